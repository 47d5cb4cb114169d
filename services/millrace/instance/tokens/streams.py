"""Streams tokens to the proxies: one long-lived stream per proxy, one message per decode step.

Events wait in a proxy's outbox until its stream takes all ready events in one message. The last of
them are kept: a proxy whose stream broke says how many it has received, and gets the rest again. A
proxy is lost when it stays away longer than the grace time or reads too slowly: `on_gone` then ends
its requests. Should it come back, it can tell by the number of the next event that it has missed
some.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import chain

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import NO_DETAIL, TokenBatch, TokenEvent

log = logging.getLogger(__name__)

MOST_WAITING_EVENTS = 1 << 16
#: So many events that a proxy's streams have taken are kept for it, or fewer large ones. A stream
#: holds less than that: gRPC stops the writer when its windows are full.
MOST_KEPT_EVENTS = 1 << 14
#: So many lost proxies are remembered, with the events that they were to get.
MOST_LOST = 4096


class _Outbox:
    """The events of one proxy: those that wait, and the last ones that its streams have taken."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.sent = 0  # events that streams have taken
        self.ready = asyncio.Event()
        self.reader: object = None
        self.expiry: asyncio.TimerHandle | None = None
        self._kept: deque[tuple[Sequence[TokenEvent], int]] = deque()  # batches with their sizes
        self._kept_size = 0

    def take(self) -> TokenBatch:
        """Takes all events that wait."""
        batch = TokenBatch(self.sent, self.events)
        self.events = []
        self.sent += len(batch.events)
        if batch.events:
            self._keep(batch.events)
        return batch

    def rewind(self, received: int) -> None:
        """Lets the events after the first `received` wait again, if all of them are kept."""
        missing = self.sent - received
        kept = list(chain.from_iterable(events for events, _ in self._kept))
        if 0 < missing <= len(kept):
            self.events = kept[-missing:] + self.events
            self.sent = received
            self._kept.clear()
            self._kept_size = 0

    def _keep(self, events: Sequence[TokenEvent]) -> None:
        size = sum(map(_size, events))
        self._kept.append((events, size))
        self._kept_size += size
        while self._kept_size > MOST_KEPT_EVENTS:
            self._kept_size -= self._kept.popleft()[1]


def _size(event: TokenEvent) -> int:
    """Returns the memory of an event, in events without detail (about 250 bytes)."""
    if event.detail is NO_DETAIL:
        return 1
    detail = event.detail()
    return 1 + len(detail.prompt_logprobs) + len(detail.pooled) // 256


class TokenStreams:
    """The outboxes of all proxies. Used from the event loop only."""

    def __init__(self, grace_s: float, on_gone: Callable[[Incarnation], None]) -> None:
        self._grace_s = grace_s
        self._on_gone = on_gone
        self._outboxes: dict[Incarnation, _Outbox] = {}
        self._lost: dict[Incarnation, int] = {}  # events of lost proxies, taken or not

    def publish(self, proxy: Incarnation, event: TokenEvent) -> None:
        """Adds an event for a proxy, whether the proxy is connected or not."""
        box = self._outbox(proxy)
        box.events.append(event)
        box.ready.set()
        if len(box.events) > MOST_WAITING_EVENTS:
            log.warning("proxy %s reads too slowly; giving its requests up", proxy.id)
            self._forget(proxy)

    async def subscribe(
        self, proxy: Incarnation, received: int | None = None
    ) -> AsyncGenerator[TokenBatch, None]:
        """Yields events as they become ready, until the reader goes away; the first batch at once.

        `received`: events that the proxy has of earlier streams. What these took after that comes
        first, if it is still kept. None: the proxy has not counted.

        A new reader of a proxy ends the old reader, whose connection may be dead although neither
        side has noticed.
        """
        box = self._outbox(proxy)
        if received is not None:
            box.rewind(received)
        me = box.reader = object()
        box.ready.set()
        self._keep(box)
        opening = True
        try:
            while True:
                await box.ready.wait()
                if box.reader is not me or self._outboxes.get(proxy) is not box:
                    return
                box.ready.clear()
                if box.events or opening:
                    opening = False
                    yield box.take()
        finally:
            if box.reader is me:
                box.reader = None
                if self._outboxes.get(proxy) is box:
                    self._expire_later(proxy, box)

    def check_integrity(self) -> list[Incarnation]:
        """Lists the proxies that have an outbox."""
        return list(self._outboxes)

    def _outbox(self, proxy: Incarnation) -> _Outbox:
        box = self._outboxes.get(proxy)
        if box is None:
            box = self._outboxes[proxy] = _Outbox()
            box.sent = self._lost.pop(proxy, 0)
            self._expire_later(proxy, box)
        return box

    def _expire_later(self, proxy: Incarnation, box: _Outbox) -> None:
        loop = asyncio.get_running_loop()
        box.expiry = loop.call_later(self._grace_s, self._forget, proxy)

    def _keep(self, box: _Outbox) -> None:
        if box.expiry is not None:
            box.expiry.cancel()
            box.expiry = None

    def _forget(self, proxy: Incarnation) -> None:
        box = self._outboxes.pop(proxy, None)
        if box is not None:
            self._keep(box)
            box.ready.set()
            self._lost[proxy] = box.sent + len(box.events)
            if len(self._lost) > MOST_LOST:
                del self._lost[next(iter(self._lost))]
            self._on_gone(proxy)
