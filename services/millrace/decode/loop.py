"""Runs the decode instance: apply changes, step, emit.

The event loop owns every request and all pages; the compute thread only runs the batch's step.
Changes to the batch are applied between two steps. `admissions.py` admits and releases requests,
`running.py` changes the batch, `output/` sends tokens and ends requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor

from millrace.core.scheduler.commands import AdmitDecode, Cancel, Command, Drain
from millrace.core.scheduler.reports import Registration
from millrace.decode.admissions import Admissions
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request_table import RequestTable
from millrace.decode.role import TokenRole
from millrace.decode.running import Running
from millrace.engine.decode_batch import TokenOut
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.tasks import Tasks


class DecodeRole(TokenRole):
    """The role of a decode instance."""

    name = "decode"

    def __init__(self, context: WorkerContext) -> None:
        tasks, table, hosted = Tasks(), RequestTable(), ShardTable()
        metrics = DecodeMetrics(context.registry)
        output = Output(context, table, metrics)
        self._admissions = Admissions(context, table, output, metrics, tasks, hosted)
        super().__init__(
            context,
            table=table,
            output=output,
            hosted=hosted,
            receiver=self._admissions.receiver,
            spread=self._admissions.spread,
            prefix_cache=self._admissions.prefixes.cache,
            tasks=tasks,
        )
        self._running = Running(context, table, self._admissions, output, metrics, tasks)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compute")

    @property
    def free_pages(self) -> int:
        """Pages that new requests may take: those that running requests may need are left out."""
        return max(0, super().free_pages - self._running.owed_pages)

    def complete_registration(self, base: Registration) -> Registration:
        return self.registration(base, self._context.decode_step)

    def on_command(self, command: Command) -> None:
        match command:
            case AdmitDecode():
                self._admissions.admit(command)
            case Cancel(request_id=request_id):
                self.cancel(request_id)
            case Drain():
                self.drain(command)

    async def run(self) -> None:
        self._tasks.spawn(self._step_forever())
        await super().run()

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        batch, wake = self._running.batch, self.table.wake
        emitted: Many[TokenOut] = ()
        while True:
            self._running.apply_changes()
            if batch.is_due:
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

    def check_integrity(self) -> None:
        super().check_integrity()
        self._running.check_integrity()

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await asyncio.to_thread(self._running.close)
        await super().close()
