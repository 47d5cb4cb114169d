"""Token streams: one from each decode instance, open before any request is placed there.

A stream from a prefill instance is opened when the first prefill-only request is placed there.
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
#: The events of so many instances are counted. One that was without requests, or out of the fleet
#: for a moment, goes on where it was.
MOST_COUNTED = 4096


class TokenListener(Protocol):
    """Receives the tokens. All methods are called on the event loop and must not wait."""

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None: ...

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        """Reports that a stream of `decode` is up. `lost`: events were lost with an earlier one."""

    def on_tokens_lost(self, decode: Incarnation) -> None:
        """Reports that the stream of `decode` broke: events may be missing."""


class TokenLinks:
    """Keeps the streams, by incarnation of the decode instance."""

    def __init__(self, proxy: Incarnation, listener: TokenListener, retry: Backoff = RETRY) -> None:
        self._proxy = proxy
        self._listener = listener
        self._retry = retry
        self._links: dict[Incarnation, asyncio.Task[None]] = {}
        self._listed: set[Incarnation] = set()
        self._received: dict[Incarnation, int] = {}  # events, on all streams to an instance
        self._failures: dict[Incarnation, int] = {}  # since a stream of the link was last up

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
        incarnation = decode.incarnation
        while True:
            reason, gone = "the stream ended", False
            try:
                await self._read(decode)
            except TokenStreamError as error:
                reason, gone = str(error), error.is_gone
            except Exception as error:  # a defect must not silence the instance for good
                log.exception("decode %s", incarnation.id)
                reason = repr(error)
            log.warning("decode %s at %s: %s", incarnation.id, decode.address, reason)
            self._listener.on_tokens_lost(incarnation)
            if gone or incarnation not in self._listed:
                self._forget(incarnation)
                return
            failures = self._failures.get(incarnation, 0)
            self._failures[incarnation] = failures + 1
            await asyncio.sleep(self._retry.pause_s(failures))

    def _forget(self, incarnation: Incarnation) -> None:
        self._links.pop(incarnation, None)
        self._failures.pop(incarnation, None)

    async def _read(self, decode: Member) -> None:
        """Reads one stream to its end."""
        incarnation, received, is_up = decode.incarnation, self._received, False
        stream = token_events(decode.address, proxy=self._proxy, decode=incarnation)
        async with aclosing(stream) as batches:
            async for first, events in batches:
                if not is_up:
                    is_up, lost = True, first != received.pop(incarnation, 0)
                    self._failures.pop(incarnation, None)
                    self._listener.on_stream_up(incarnation, lost=lost)
                received[incarnation] = first + len(events)
                if len(received) > MOST_COUNTED:
                    del received[next(iter(received))]
                self._listener.on_batch(incarnation, events)
