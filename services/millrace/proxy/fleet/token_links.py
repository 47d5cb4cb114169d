"""Token streams: one from each decode instance, open before any request is placed there.

A stream from a prefill instance is opened when the first prefill-only request is placed there. A
stream that breaks is resumed at once if its instance answers, from the first event that is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from millrace.concurrency import cancel
from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.core.token_events import TokenEvent
from millrace.wire.clients.token_stream import TokenStreamError, token_events

log = logging.getLogger(__name__)

RETRY = Backoff(0.05, 2.0)
#: A stream that broke goes on unnoticed if the next one is up within this time. Requests of an
#: instance that is gone wait so long, unless their connection is refused or the scheduler knows.
RESUME_WITHIN_S = 1.0
#: The events of so many instances are counted. One that was without requests, or out of the fleet
#: for a moment, goes on where it was.
MOST_COUNTED = 4096


class TokenListener(Protocol):
    """Receives the tokens. All methods are called on the event loop and must not wait."""

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None: ...

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        """Reports that a stream of `decode` is up. `lost`: events were lost with an earlier one."""

    def on_tokens_lost(self, decode: Incarnation) -> None:
        """Reports that the stream of `decode` broke and no other is up: events may be missing."""


class TokenLinks:
    """Keeps the streams, by incarnation of the decode instance."""

    def __init__(self, proxy: Incarnation, listener: TokenListener, retry: Backoff = RETRY) -> None:
        self._proxy = proxy
        self._listener = listener
        self._retry = retry
        self._links: dict[Incarnation, asyncio.Task[None]] = {}
        self._listed: set[Incarnation] = set()
        self._received: dict[Incarnation, int] = {}  # events, on all streams to an instance
        self._up: set[Incarnation] = set()  # whose stream is up

    def keep(self, members: Iterable[Member], on_demand: Iterable[Member] = ()) -> None:
        """Opens streams to all members, and keeps those that are open to members `on_demand`.

        Streams to other instances stay until they break or `prune` ends them.
        """
        self._listed = {member.incarnation for member in on_demand}
        for member in members:
            self._listed.add(member.incarnation)
            self.open(member)

    def open(self, decode: Member) -> None:
        """Opens a stream to one instance, unless it has one."""
        if decode.incarnation not in self._links:
            self._links[decode.incarnation] = asyncio.create_task(self._run(decode))

    def prune(self, in_use: set[Incarnation]) -> None:
        """Ends the streams to instances that left the fleet and serve no request."""
        for incarnation in self._links.keys() - self._listed - in_use:
            self._links[incarnation].cancel()
            self._forget(incarnation)

    async def close(self) -> None:
        tasks = list(self._links.values())
        self._links.clear()
        await cancel(*tasks)

    async def _run(self, decode: Member) -> None:
        """Reads the stream and reconnects, until the instance is known to be gone."""
        incarnation, within_s, failures = decode.incarnation, None, 0
        while True:
            reason, gone = "the stream ended", False
            try:
                await self._read(decode, within_s)
            except TokenStreamError as error:
                reason, gone = str(error), error.is_gone
            except Exception as error:  # a defect must not silence the instance for good
                log.exception("decode %s", incarnation.id)
                reason = repr(error)
            log.warning("decode %s at %s: %s", incarnation.id, decode.address, reason)
            if incarnation in self._up:
                self._up.remove(incarnation)
                within_s, failures = RESUME_WITHIN_S, 0
            else:
                self._listener.on_tokens_lost(incarnation)
                if gone or incarnation not in self._listed:
                    self._forget(incarnation)
                    return
                within_s = None
            await asyncio.sleep(self._retry.pause_s(failures))
            failures += 1

    def _forget(self, incarnation: Incarnation) -> None:
        self._links.pop(incarnation, None)
        self._up.discard(incarnation)

    async def _read(self, decode: Member, within_s: float | None) -> None:
        """Reads one stream to its end. `within_s`: the longest time until it is up."""
        incarnation, counted = decode.incarnation, self._received
        stream = token_events(
            decode.address,
            proxy=self._proxy,
            decode=incarnation,
            received=counted.get(incarnation),
            within_s=within_s,
        )
        async with aclosing(stream) as batches:
            async for first, events in batches:
                if incarnation not in self._up:
                    self._up.add(incarnation)
                    lost = first != counted.pop(incarnation, 0)
                    self._listener.on_stream_up(incarnation, lost=lost)
                counted[incarnation] = first + len(events)
                if len(counted) > MOST_COUNTED:
                    del counted[next(iter(counted))]
                self._listener.on_batch(incarnation, events)
