"""Runs the decode instance: apply changes, step, emit.

The event loop owns every request and all pages; the compute thread only runs the batch's step.
Changes to the batch are applied between two steps. `admissions.py` admits and releases requests,
`running.py` changes the batch, `output/` sends tokens and ends requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from millrace.core.scheduler.commands import AdmitDecode, Cancel, Command, Drain
from millrace.core.scheduler.reports import Heartbeat, Registration
from millrace.decode.admissions import Admissions
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.pace import TokenPace
from millrace.decode.request_table import RequestTable
from millrace.decode.running import Running
from millrace.decode.servicer import DecodeServicer
from millrace.engine.decode_batch import TokenOut
from millrace.instance.host import WorkerContext
from millrace.instance.prefix import cached_blocks
from millrace.instance.shards.kvp_servicer import KvpServicer
from millrace.instance.shards.shard_host import ShardHost
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.tasks import Tasks
from millrace.instance.transfer.kv_servicer import KvReceiverServicer

log = logging.getLogger(__name__)


class DecodeRole:
    """The role of a decode instance; `_table` has every request that the instance holds."""

    name = "decode"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pool = context.engine.pool
        self._tasks = Tasks()
        self._pace = TokenPace()
        self._table = RequestTable()
        metrics = DecodeMetrics(context.registry)
        self._output = Output(context, self._table, metrics)
        hosted = self._hosted = ShardTable()
        self._admissions = Admissions(
            context, self._table, self._output, metrics, self._tasks, hosted
        )
        self._host = ShardHost(context, context.engine, hosted, self._admissions.receiver)
        self.prefix_cache = self._admissions.prefixes.cache
        self._running = Running(
            context, self._table, self._admissions, self._output, metrics, self._tasks
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compute")

    @property
    def kv_region(self) -> int:
        return self._admissions.receiver.region

    @property
    def num_spill_pages(self) -> int:
        """Pages of the pool that the instance reserves for itself, not for requests."""
        return len(self._admissions.spread.spill_pages)

    def attach(self, server: grpc.aio.Server) -> None:
        KvReceiverServicer(self._admissions.receiver).add_to(server)
        DecodeServicer(self._output.streams, self._context.incarnation).add_to(server)
        KvpServicer(self._host).add_to(server)

    def complete_registration(self, base: Registration) -> Registration:
        self.prefix_cache.report_all()
        return replace(
            base,
            kv_pages=base.kv_pages - self.num_spill_pages,
            max_batch=self._context.config.engine.max_batch,
            decode_step=self._context.decode_step,
            block_tokens=self.prefix_cache.block_tokens,
        )

    def counts(self) -> tuple[int, int]:
        return self._table.counts()

    def heartbeat(self) -> Heartbeat:
        (running, waiting), tbt_s = self.counts(), self._pace.take_s()
        return Heartbeat(
            free_pages=max(0, self._pool.free_pages - self._running.owed_pages),
            running=running,
            waiting=waiting,
            tbt_s=tbt_s,
            cached=cached_blocks(self.prefix_cache),
        )

    def on_command(self, command: Command) -> None:
        match command:
            case AdmitDecode():
                self._admissions.admit(command)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case Drain(abort=abort):
                self._output.evict(abort=abort)
                self._host.lose_all("the KVP worker had to release it")

    def _cancel(self, request_id: str) -> None:
        if (request := self._table.get(request_id)) is not None:
            self._output.cancel(request)
        else:
            self._host.forget(request_id)

    async def run(self) -> None:
        self._tasks.spawn(self._host.run())
        self._tasks.spawn(self._output.journal.run())
        self._tasks.spawn(self._step_forever())
        await self._tasks.watch()

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        batch, wake = self._running.batch, self._table.wake
        emitted: Many[TokenOut] = ()
        while True:
            self._running.apply_changes()
            if batch.size:
                step = loop.run_in_executor(self._thread, self._running.step)
                self._output.step_tokens(emitted, batch.size)  # while the next step computes
                emitted = await step
                self._pace.stepped(time.perf_counter())
            else:
                self._pace.paused()
                self._output.step_tokens(emitted, 0)
                emitted = ()
                await wake.wait()
            wake.clear()

    async def wait_idle(self) -> None:
        while len(self._table) or len(self._hosted):
            await asyncio.gather(self._table.wait_idle(), self._hosted.wait_idle())

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d requests: %s", len(self._table), reason)
        for request in self._table:
            self._output.move(request)
        self._host.lose_all(reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=self.num_spill_pages)
        self.prefix_cache.check_integrity()
        self._admissions.receiver.check_integrity()
        self._running.check_integrity()
        self._admissions.spread.check_integrity()
        self._host.check_integrity()

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await asyncio.to_thread(self._running.close)
        await self._output.journal.flush()
        await self._admissions.spread.close_all()
        await self._host.close()
        await self._admissions.receiver.close()
