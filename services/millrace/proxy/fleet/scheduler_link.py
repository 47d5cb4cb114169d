"""The proxy's one stream to the scheduler: submissions, cancellations and load out, verdicts in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc

from millrace.proxy.codec import Life, incarnation_of
from millrace.wire.channel import open_channel
from millrace.wire.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 2.0
#: Requests of one SubmitBatch: keeps a message far below the wire's bound.
MAX_BATCH = 256

Item = (
    common_pb2.RequestSpec
    | scheduler_pb2.CancelRequest
    | scheduler_pb2.ProxyLoad
    | scheduler_pb2.AskProgress
)


class SchedulerEvents(Protocol):
    """Who hears what the scheduler says. Called on the event loop; must not wait."""

    def on_queued(self, queued: scheduler_pb2.Queued) -> None: ...

    def on_placed(self, placed: scheduler_pb2.Placed) -> None: ...

    def on_refused(self, refused: scheduler_pb2.Refused) -> None: ...

    def on_failed(self, failed: scheduler_pb2.Failed) -> None: ...

    def on_progress(self, progress: scheduler_pb2.Progress, /) -> None: ...

    def on_fleet(self, fleet: scheduler_pb2.Fleet) -> None: ...

    def on_scheduler_lost(self) -> None: ...


class SchedulerLink:
    """Keeps the stream up while `run` runs. What is queued in one turn of the loop is one batch."""

    def __init__(self, address: str, life: Life, events: SchedulerEvents) -> None:
        self._address = address
        self._life = life
        self._events = events
        self._outbox: list[Item] = []
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._streams = 0  # grows when one starts and when it ends
        #: The scheduler answered on the stream that is up now.
        self.connected = False

    def submit(self, spec: common_pb2.RequestSpec) -> None:
        """Queues a submission. Call it only while connected."""
        self._queue(spec)

    def cancel(self, request_id: str, reason: str) -> None:
        """Queues a cancellation, behind the request's submission. Dropped without a connection."""
        if self.connected:
            self._queue(scheduler_pb2.CancelRequest(request_id=request_id, reason=reason))

    def report(self, parked: int) -> None:
        """Queues word of how many requests wait here. Dropped without a connection."""
        if self.connected:
            self._queue(scheduler_pb2.ProxyLoad(parked_requests=parked))

    def ask_progress(self, request_ids: Sequence[str]) -> None:
        """Queues a question for how far prompts are. Dropped without a connection."""
        if self.connected:
            self._queue(scheduler_pb2.AskProgress(request_ids=request_ids))

    def _queue(self, item: Item) -> None:
        self._outbox.append(item)
        self._wake.set()
        self._flushed.clear()

    async def run(self) -> None:
        """Connects, serves and reconnects until it is cancelled."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                async with open_channel(self._address) as channel:
                    await self._serve(scheduler_pb2_grpc.SchedulerStub(channel))
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or str(error.code())
            except Exception as error:  # a defect must not cut the proxy off for good
                log.exception("scheduler %s", self._address)
                reason = repr(error)
            log.warning("scheduler %s: %s; retrying", self._address, reason)
            if self.connected:
                retry_s = RETRY_FIRST_S
            self._lose()
            await asyncio.sleep(retry_s * random.uniform(0.7, 1.3))
            retry_s = min(2 * retry_s, RETRY_MOST_S)

    async def flushed(self, timeout_s: float) -> None:
        """Returns once what was queued is on its way, the connection is gone or time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._flushed.wait(), timeout_s)

    async def _serve(self, stub: scheduler_pb2_grpc.SchedulerStub) -> None:
        self._streams += 1
        call = stub.ConnectProxy(self._sent(self._streams))
        try:
            async for update in call:
                self._receive(update)
        finally:
            call.cancel()
            self._streams += 1
            self._wake.set()

    async def _sent(self, stream: int) -> AsyncIterator[scheduler_pb2.ProxyMessage]:
        """Our side of the stream; gRPC asks for the next message once the last is written.

        gRPC leaves the writer of a failed stream waiting: it must end, or it would take what is
        meant for the next stream.
        """
        yield scheduler_pb2.ProxyMessage(hello=incarnation_of(self._life))
        while True:
            await self._wake.wait()
            if stream != self._streams:
                return
            self._wake.clear()
            items, self._outbox = self._outbox, []
            for message in _messages(items):
                yield message
            if not self._outbox:
                self._flushed.set()

    def _receive(self, update: scheduler_pb2.ProxyUpdate) -> None:
        events = self._events
        match update.WhichOneof("kind"):
            case "queued":
                events.on_queued(update.queued)
            case "placed":
                events.on_placed(update.placed)
            case "refused":
                events.on_refused(update.refused)
            case "failed":
                events.on_failed(update.failed)
            case "progress":
                events.on_progress(update.progress)
            case "fleet":
                self.connected = True
                events.on_fleet(update.fleet)

    def _lose(self) -> None:
        was_connected, self.connected = self.connected, False
        self._outbox.clear()
        self._flushed.set()
        if was_connected:
            self._events.on_scheduler_lost()


def _messages(items: list[Item]) -> list[scheduler_pb2.ProxyMessage]:
    """Neighbouring submissions as batches, all else between them, in order."""
    messages: list[scheduler_pb2.ProxyMessage] = []
    batch: list[common_pb2.RequestSpec] = []
    for item in items:
        if isinstance(item, common_pb2.RequestSpec):
            batch.append(item)
            if len(batch) < MAX_BATCH:
                continue
        if batch:
            messages.append(_submission(batch))
            batch = []
        if isinstance(item, scheduler_pb2.CancelRequest):
            messages.append(scheduler_pb2.ProxyMessage(cancel=item))
        elif isinstance(item, scheduler_pb2.ProxyLoad):
            messages.append(scheduler_pb2.ProxyMessage(load=item))
        elif isinstance(item, scheduler_pb2.AskProgress):
            messages.append(scheduler_pb2.ProxyMessage(ask=item))
    if batch:
        messages.append(_submission(batch))
    return messages


def _submission(batch: list[common_pb2.RequestSpec]) -> scheduler_pb2.ProxyMessage:
    return scheduler_pb2.ProxyMessage(submit=scheduler_pb2.SubmitBatch(requests=batch))
