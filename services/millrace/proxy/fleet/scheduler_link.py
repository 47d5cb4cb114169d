"""The proxy's one stream to the leading scheduler: submissions, cancellations and load go out, the
scheduler's decisions come in. Each stream begins with the requests that earlier streams left open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import KeepTraces
from millrace.core.scheduler.effects import Fail, Refuse, Suspect
from millrace.core.scheduler.events import CancelRequested
from millrace.state.leader import LeaderWatch
from millrace.wire.clients.proxy_stream import scheduler_updates
from millrace.wire.clients.scheduler_stream import SchedulerStreamError
from millrace.wire.fleet_messages import (
    AllOpen,
    AskProgress,
    EncodedSpec,
    Fleet,
    OpenRequest,
    Placed,
    Progress,
    ProxyLoad,
    ProxyMessage,
    ProxyUpdate,
    Queued,
    Submit,
)

log = logging.getLogger(__name__)

RETRY = Backoff(0.1, 1.0)


class SchedulerListener(Protocol):
    """Receives the scheduler's messages. All methods are called on the event loop and must not
    wait.
    """

    def on_queued(self, queued: Queued) -> None: ...

    def on_placed(self, placed: Placed) -> None: ...

    def on_refused(self, refused: Refuse) -> None: ...

    def on_failed(self, failed: Fail) -> None: ...

    def on_suspect(self, suspect: Suspect) -> None: ...

    def on_progress(self, progress: Progress, /) -> None: ...

    def on_fleet(self, fleet: Fleet) -> None: ...

    def on_scheduler_lost(self) -> None: ...

    def open_requests(self) -> list[OpenRequest]:
        """Lists the requests that a scheduler has, or should have."""


class SchedulerLink:
    """Keeps the stream up while `run` runs. The items queued in one turn of the loop are sent
    together.
    """

    def __init__(
        self,
        leaders: LeaderWatch,
        proxy: Incarnation,
        listener: SchedulerListener,
        retry: Backoff = RETRY,
    ) -> None:
        self._leaders = leaders
        self._proxy = proxy
        self._listener = listener
        self._retry = retry
        self._outbox: list[ProxyMessage] = []
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._streams = 0  # grows when a stream starts and when a stream ends
        self._named = False  # the open requests are queued on the present stream
        #: The scheduler answered on the stream that is up now.
        self.connected = False

    def submit(self, spec: EncodedSpec) -> None:
        """Queues a submission. Without a stream the next one begins with the request."""
        if self._named:
            self._queue(Submit(spec=spec))

    def cancel(self, request_id: str, reason: str) -> None:
        """Queues a cancellation, after the request's submission. Dropped without a stream: the next
        one does not name the request.
        """
        if self._named:
            self._queue(CancelRequested(request_id=request_id, reason=reason))

    def report(self, parked: int) -> None:
        """Queues the number of requests that wait here. Dropped without a connection."""
        if self.connected:
            self._queue(ProxyLoad(parked_requests=parked))

    def ask_progress(self, request_ids: Sequence[str]) -> None:
        """Queues a question for how far prompts are. Dropped without a connection."""
        if self.connected:
            self._queue(AskProgress(request_ids=tuple(request_ids)))

    def keep_trace(self, trace_id: str) -> None:
        """Queues the name of a trace that all processes are to export. Dropped without a
        connection.
        """
        if self.connected:
            self._queue(KeepTraces(trace_ids=(trace_id,)))

    def _queue(self, item: ProxyMessage) -> None:
        self._outbox.append(item)
        self._wake.set()
        self._flushed.clear()

    async def run(self) -> None:
        """Connects, serves and reconnects until it is cancelled."""
        failures = 0  # in a row
        while True:
            address, changes = self._leaders.address(), self._leaders.changes
            reason = "the stream ended"
            try:
                await self._leaders.serve_until_replaced(address, changes, self._serve(address))
            except SchedulerStreamError as error:
                reason = str(error)
                self._leaders.hint(error.leader)
            except Exception as error:  # a defect must not disconnect the proxy forever
                log.exception("scheduler %s", address)
                reason = repr(error)
            quiet = failures > 0 and not self.connected
            level = logging.DEBUG if quiet else logging.WARNING
            log.log(level, "scheduler %s: %s; retrying", address, reason)
            if self.connected:
                failures = 0
            self._lose()
            if not await self._leaders.replaced(changes, self._retry.pause_s(failures)):
                failures += 1

    async def flushed(self, timeout_s: float) -> None:
        """Returns once all queued items are sent, the connection is gone or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._flushed.wait()

    async def _serve(self, address: str) -> None:
        self._streams += 1
        sent = self._sent(self._streams)
        stream = scheduler_updates(address, self._proxy, sent, self._leaders.fence)
        self._named = True
        for request in self._listener.open_requests():
            self._queue(request)
        self._queue(AllOpen())
        try:
            async with contextlib.aclosing(stream) as updates:
                async for update in updates:
                    if isinstance(update, Fleet):
                        self._leaders.follow(update.lease, address)
                    self._receive(update)
        finally:
            self._streams += 1
            self._wake.set()

    async def _sent(self, stream: int) -> AsyncIterator[list[ProxyMessage]]:
        """Yields our side of the stream: gRPC asks for more once the last items are written.

        gRPC leaves the writer of a failed stream waiting. That writer must end, or it would take
        the items of the next stream.
        """
        while True:
            await self._wake.wait()
            if stream != self._streams:
                return
            self._wake.clear()
            items, self._outbox = self._outbox, []
            yield items
            if not self._outbox:
                self._flushed.set()

    def _receive(self, update: ProxyUpdate) -> None:
        listener = self._listener
        match update:
            case Queued():
                listener.on_queued(update)
            case Placed():
                listener.on_placed(update)
            case Refuse():
                listener.on_refused(update)
            case Fail():
                listener.on_failed(update)
            case Suspect():
                listener.on_suspect(update)
            case Progress():
                listener.on_progress(update)
            case Fleet():
                self.connected = True
                listener.on_fleet(update)

    def _lose(self) -> None:
        was_connected, self.connected = self.connected, False
        self._named = False
        self._outbox.clear()
        self._flushed.set()
        if was_connected:
            self._listener.on_scheduler_lost()
