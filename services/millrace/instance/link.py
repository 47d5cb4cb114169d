"""Connects a worker to the scheduler: registers, reports, receives commands, reconnects.

A worker that loses its scheduler drops all requests before it registers again: by then, the
scheduler has given them up (lease), and a request must have one owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from millrace.core.scheduler.commands import Command, Registered
from millrace.core.scheduler.reports import Heartbeat, Registration, Report
from millrace.wire.clients.scheduler_stream import (
    SchedulerStream,
    SchedulerStreamError,
    scheduler_stream,
)

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.2
RETRY_MOST_S = 2.0


class WorkerLink:
    """Keeps one stream to the scheduler open until `close`.

    `register` and `heartbeat` return the current state; `on_command` gets every command in order;
    `on_lost` drops all work and returns when none is left.
    """

    def __init__(
        self,
        address: str,
        *,
        register: Callable[[], Registration],
        heartbeat: Callable[[], Heartbeat],
        on_command: Callable[[Command], None],
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = address
        self._register = register
        self._heartbeat = heartbeat
        self._on_command = on_command
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[Report | None] = asyncio.Queue()
        self._closing = False
        self._refusing = False
        self.connected = asyncio.Event()

    def send(self, report: Report) -> None:
        """Queues a report. Without a stream, the report is dropped: the scheduler has given up the
        requests that the report is about.
        """
        if self.connected.is_set():
            self._outbox.put_nowait(report)

    async def run(self) -> None:
        """Connects, serves and reconnects until `close` is called."""
        retry_s = RETRY_FIRST_S
        while not self._closing:
            try:
                self._outbox = asyncio.Queue()
                async with scheduler_stream(
                    self._address, self._register(), self._reports(self._outbox)
                ) as stream:
                    await self._serve_stream(stream)
                retry_s = RETRY_FIRST_S
            except SchedulerStreamError as error:
                log.warning("scheduler %s: %s; retrying", self._address, error)
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
        """Drops all later commands; the end of the stream tells the scheduler so."""
        self._refusing = True

    def close(self) -> None:
        """Ends the stream after the queued reports are sent."""
        self._closing = True
        self._outbox.put_nowait(None)

    async def _serve_stream(self, stream: SchedulerStream) -> None:
        heart: asyncio.Task[None] | None = None
        try:
            async for command in stream:
                if isinstance(command, Registered):
                    self.connected.set()
                    heart = asyncio.create_task(self._beat(command.heartbeat_s))
                if not self._refusing:
                    self._on_command(command)
        finally:
            if heart is not None:
                heart.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await heart
            self._outbox.put_nowait(None)  # grpc leaves the writer of a failed stream waiting

    async def _reports(self, outbox: asyncio.Queue[Report | None]) -> AsyncIterator[Report]:
        while (report := await outbox.get()) is not None:
            yield report

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.send(self._heartbeat())
