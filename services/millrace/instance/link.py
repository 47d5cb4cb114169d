"""A worker's one stream to the scheduler: registers, reports, receives commands, reconnects.

A worker that loses its scheduler drops all it holds before it registers again: the scheduler has
given its requests up by then (lease), and a request must have one owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from millrace.wire.channel import open_channel
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.2
RETRY_MOST_S = 2.0


class WorkerLink:
    """Keeps the stream up until `close`.

    `register` and `heartbeat` build the current messages; `on_command` gets every command in order;
    `on_lost` drops all work and returns when nothing of it is left.
    """

    def __init__(
        self,
        address: str,
        *,
        register: Callable[[], scheduler_pb2.Register],
        heartbeat: Callable[[], scheduler_pb2.Heartbeat],
        on_command: Callable[[scheduler_pb2.WorkerCommand], None],
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = address
        self._register = register
        self._heartbeat = heartbeat
        self._on_command = on_command
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[scheduler_pb2.WorkerMessage | None] = asyncio.Queue()
        self._closing = False
        self._refusing = False
        self.connected = asyncio.Event()

    def send(self, message: scheduler_pb2.WorkerMessage) -> None:
        """Queues a message. News of a life that the scheduler has given up is dropped."""
        if self.connected.is_set():
            self._outbox.put_nowait(message)

    async def run(self) -> None:
        """Connects, serves and reconnects until `close` was called."""
        retry_s = RETRY_FIRST_S
        while not self._closing:
            try:
                async with open_channel(self._address) as channel:
                    await self._serve_stream(scheduler_pb2_grpc.SchedulerStub(channel))
                retry_s = RETRY_FIRST_S
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "scheduler %s: %s; retrying", self._address, error.details() or error.code()
                )
            was_connected = self.connected.is_set()
            self.connected.clear()
            if self._closing:
                return
            if was_connected:
                retry_s = RETRY_FIRST_S
                await self._on_lost()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MOST_S)

    def refuse_commands(self) -> None:
        """Commands are dropped from here on, for the end of the stream to answer."""
        self._refusing = True

    def close(self) -> None:
        """Ends the stream after what is queued was sent."""
        self._closing = True
        self._outbox.put_nowait(None)

    async def _serve_stream(self, stub: scheduler_pb2_grpc.SchedulerStub) -> None:
        self._outbox = asyncio.Queue()
        call = stub.ConnectWorker(self._messages())
        heart: asyncio.Task[None] | None = None
        try:
            async for command in call:
                if command.WhichOneof("kind") == "registered":
                    self.connected.set()
                    heart = asyncio.create_task(self._beat(command.registered.heartbeat_s))
                if not self._refusing:
                    self._on_command(command)
        finally:
            if heart is not None:
                heart.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await heart
            call.cancel()
            self._outbox.put_nowait(None)  # grpc leaves the writer of a failed stream waiting

    async def _messages(self) -> AsyncIterator[scheduler_pb2.WorkerMessage]:
        yield scheduler_pb2.WorkerMessage(register=self._register())
        outbox = self._outbox
        while (message := await outbox.get()) is not None:
            yield message

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.send(scheduler_pb2.WorkerMessage(heartbeat=self._heartbeat()))


def request_failed(
    request_id: str, message: str, *, retryable: bool, attempt: int = 0, kept_tokens: int = 0
) -> scheduler_pb2.WorkerMessage:
    """The report that this worker can't do its part of a request, in one attempt or (0) at all.

    `kept_tokens`: of the prompt, whose KV a decode instance keeps for the next attempt.
    """
    return scheduler_pb2.WorkerMessage(
        request_failed=scheduler_pb2.RequestFailed(
            request_id=request_id,
            message=message,
            retryable=retryable,
            attempt=attempt,
            kept_tokens=kept_tokens,
        )
    )


def request_released(
    request_id: str, *, complete: bool = False, attempt: int = 0
) -> scheduler_pb2.WorkerMessage:
    """The report that this worker holds nothing of a request any more.

    `complete`: all of its part was done; a prefill instance computed and sent it. `attempt`: the
    last that a decode instance was told of.
    """
    released = scheduler_pb2.RequestReleased(
        request_id=request_id, complete=complete, attempt=attempt
    )
    return scheduler_pb2.WorkerMessage(request_released=released)
