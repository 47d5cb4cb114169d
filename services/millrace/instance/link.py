"""Connects a worker to the leading scheduler: registers, reports, receives commands, reconnects.

A worker that loses its scheduler goes on with all its work, and tells the next one what it holds
(`core.scheduler.ledger`). A scheduler that has given the requests up meanwhile cancels them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from millrace.core.backoff import Backoff
from millrace.core.scheduler.commands import Command, Registered
from millrace.core.scheduler.ledger import Ledger
from millrace.core.scheduler.reports import CachedBlocks, Draining, Heartbeat, Registration, Report
from millrace.state.leader import LeaderWatch
from millrace.wire.clients.scheduler_stream import (
    SchedulerStream,
    SchedulerStreamError,
    scheduler_stream,
)

log = logging.getLogger(__name__)

RETRY = Backoff(0.1, 1.0)


class WorkerLink:
    """Keeps one stream to the leader of the schedulers open until `close`.

    `register`, `heartbeat` and `cached_blocks` return the current state; `on_command` gets every
    command in order.
    """

    def __init__(
        self,
        leaders: LeaderWatch,
        *,
        register: Callable[[], Registration],
        heartbeat: Callable[[], Heartbeat],
        cached_blocks: Callable[[], CachedBlocks | None],
        on_command: Callable[[Command], None],
        retry: Backoff = RETRY,
    ) -> None:
        self._leaders = leaders
        self._retry = retry
        self._register = register
        self._heartbeat = heartbeat
        self._cached_blocks = cached_blocks
        self._on_command = on_command
        self._ledger = Ledger()
        self._outbox: asyncio.Queue[Report | None] = asyncio.Queue()
        self._registering = False  # the present stream has the content of the ledger
        self._closing = False
        self._refusing = False
        self._draining = False
        self.connected = asyncio.Event()

    def send(self, report: Report) -> None:
        """Queues a report. Without a stream the next registration tells what it tells."""
        self._ledger.reported(report)
        self._draining |= isinstance(report, Draining)
        if self._registering:
            self._outbox.put_nowait(report)

    async def run(self) -> None:
        """Connects, serves and reconnects until `close` is called."""
        failures = 0  # in a row
        while not self._closing:
            address, changes = self._leaders.address(), self._leaders.changes
            try:
                await self._serve(address, changes)
                log.info("scheduler %s: the stream ended", address)
            except SchedulerStreamError as error:
                self._leaders.hint(error.leader)
                quiet = failures > 0 and not self.connected.is_set()
                level = logging.DEBUG if quiet else logging.WARNING
                log.log(level, "scheduler %s: %s; retrying", address, error)
            self._registering = False
            if self.connected.is_set():
                failures = 0
            self.connected.clear()
            pause_s = self._retry.pause_s(failures)
            if not self._closing and not await self._leaders.replaced(changes, pause_s):
                failures += 1

    async def _serve(self, address: str, changes: int) -> None:
        """Serves one stream to its end, or until another scheduler leads."""
        registration = replace(self._register(), held=self._ledger.held())
        self._outbox, self._registering = asyncio.Queue(), True
        if self._draining:
            self._outbox.put_nowait(Draining())
        async with scheduler_stream(
            address, registration, self._reports(self._outbox), self._leaders.fence
        ) as stream:
            work = self._serve_stream(stream, address)
            await self._leaders.serve_until_replaced(address, changes, work)

    def refuse_commands(self) -> None:
        """Drops all later commands; the end of the stream tells the scheduler so."""
        self._refusing = True

    def close(self) -> None:
        """Ends the stream after the queued reports are sent."""
        self._closing = True
        self._outbox.put_nowait(None)

    async def _serve_stream(self, stream: SchedulerStream, address: str) -> None:
        heart: asyncio.Task[None] | None = None
        try:
            async for command in stream:
                if isinstance(command, Registered):
                    self._leaders.follow(command.lease, address)
                    self.connected.set()
                    heart = asyncio.create_task(self._beat(command.heartbeat_s))
                if not self._refusing:
                    self._ledger.commanded(command)
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
            if (cached := self._cached_blocks()) is not None:
                self.send(cached)
