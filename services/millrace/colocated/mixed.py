"""Runs `millrace colocated --role mixed`: prefill and decode in one batch (Medha section 4.3).

The event loop owns every request and all pages; the compute thread runs iterations: a token of each
answer and chunks of prompts in one pass. Changes are applied between two iterations. The scheduler
places requests at the instance as at a decode instance, and the instance prefills them itself: no
KV is transferred to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf

from millrace.colocated.admissions import MixedAdmissions
from millrace.colocated.calibration import mixed_batches
from millrace.colocated.compute import Iteration, MixedCompute
from millrace.colocated.metrics import MixedMetrics
from millrace.colocated.packing import IterationPacker, Plan, packing_config
from millrace.colocated.predictor import Predictor
from millrace.colocated.prompts import Prompts
from millrace.concurrency import stop_event
from millrace.core.config import Config
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.operators import OperatorModel
from millrace.core.scheduler.commands import (
    AdmitDecode,
    Cancel,
    Command,
    Drain,
    PolicyInForce,
    Registered,
    RunPrefill,
)
from millrace.core.scheduler.reports import Registration
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.decode.role import TokenRole
from millrace.instance.host import WorkerOptions, open_for, serve_role
from millrace.instance.latency import prefill_latency
from millrace.instance.role import Loaded, WorkerContext
from millrace.instance.shards.shard_table import NOBODY, ShardTable
from millrace.instance.tasks import Tasks
from millrace.instance.vitals import open_vitals
from millrace.profiles import decode_step
from millrace.transfer.push.receive.manager import ReceiveManager


class MixedRole(TokenRole):
    """The role of a mixed instance."""

    name = "mixed"

    def __init__(self, context: WorkerContext, operators: OperatorModel) -> None:
        """`operators` predict iterations. Raises ConfigError for contradictory settings."""
        tasks, table, hosted = Tasks(), RequestTable(), ShardTable()
        metrics = self._decode_metrics = DecodeMetrics(context.registry)
        self._admissions = MixedAdmissions(context, table, metrics, tasks, self._shard_lost)
        super().__init__(
            context,
            table=table,
            output=Output(context, table, metrics),
            hosted=hosted,
            receiver=ReceiveManager(
                transport=context.transport,
                layout=context.engine.layout,
                storage=context.engine.storage,
                identity=context.incarnation,
                config=context.config.transfer,
                callbacks=hosted.beside(NOBODY, context.on_corrupt),
            ),
            spread=self._admissions.spread,
            prefix_cache=self._admissions.prefix_cache,
            tasks=tasks,
        )
        self._operators = operators
        self._metrics = MixedMetrics(context.registry)
        self._predictor = Predictor(operators)
        self._packer = IterationPacker(
            operators, self._predictor, context.config, self._admissions.most_spread_tokens
        )
        self._prompts = Prompts(context, table, self._output, self._packer, tasks)
        self._compute = MixedCompute(context.engine, context.config.engine.max_batch)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mixed-compute")

    def complete_registration(self, base: Registration) -> Registration:
        step = DecodeStepTime.of(decode_step.of_profile(self._operators))
        is_adaptive = self._context.config.mixed.chunking == "adaptive"
        return replace(self.registration(base, step), adaptive_chunks=is_adaptive)

    def counts(self) -> tuple[int, int]:
        running = self.table.counts()[0] + self._prompts.begun
        return running, len(self.table) - running

    def on_command(self, command: Command) -> None:
        match command:
            case AdmitDecode():
                self._admissions.admit(command)
            case RunPrefill(request=spec):
                self._prompts.expect(spec.request_id)
            case (
                Registered(policy=name, weights=weights) | PolicyInForce(name=name, weights=weights)
            ):
                if name:
                    self._packer.rank_by(name, weights, time.monotonic())
            case Cancel(request_id=request_id):
                self.cancel(request_id)
            case Drain():
                self.drain(command)

    def _shard_lost(self, request: DecodeRequest, why: str) -> None:
        self._output.fail(request, why, "transfer")

    async def run(self) -> None:
        self._tasks.spawn(self._iterate_forever())
        await super().run()

    async def _iterate_forever(self) -> None:
        loop = asyncio.get_running_loop()
        wake, last = self.table.wake, Iteration()
        while True:
            self._let_out()
            self._admissions.let_in(self._compute.batch)
            plan = self._plan()
            decodes = plan.shape.decodes
            if decodes or plan.shares:
                self._prompts.begin(plan)
                iteration = loop.run_in_executor(self._thread, self._compute.run, plan.shares)
                self._output.step_tokens(last.tokens, decodes)  # while the next iteration computes
                last = await iteration
                self._take(plan, last)
            else:
                self._pace.paused()
                self._output.step_tokens(last.tokens, 0)
                last = Iteration()
                await wake.wait()
            wake.clear()

    def _plan(self) -> Plan:
        rows = self._compute.batch.rows()
        return self._packer.pack(
            self._prompts.waiting(),
            time.monotonic(),
            decodes=len(rows),
            context_tokens=int(rows.kv_lens.sum()),
            pace_s=self._tightest_pace_s(),
        )

    def _tightest_pace_s(self) -> float:
        """Returns the tightest pace of the running requests that they could keep alone; infinite
        without any.
        """
        paced = [r for r in self.table if r.joined and r.open_choices and r.pace_s < inf]
        return min((r.pace_s for r in paced if self._packer.alone_s(r) <= r.pace_s), default=inf)

    def _take(self, plan: Plan, iteration: Iteration) -> None:
        self._predictor.observe(plan.shape, iteration.seconds)
        self._metrics.iterated(plan, iteration.seconds)
        self._metrics.device_passes.follow(self._compute.states.prefills)
        if plan.shape.decodes:
            self._pace.stepped(time.perf_counter())
            self._decode_metrics.batch.observe(plan.shape.decodes)
            self._decode_metrics.step_s.observe(iteration.seconds)
            self._decode_metrics.device_steps.follow(self._compute.states.steps)
        for request in self._prompts.take(plan, iteration, time.monotonic()):
            self._admissions.keep_prefix(request)

    def _let_out(self) -> None:
        for request in self.table.leaving:
            self._prompts.drop(request.id)
            self._compute.batch.remove(request.id)
            self._admissions.release(request)
        self.table.leaving.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._compute.batch.check_integrity()
        self._prompts.check_integrity()

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await super().close()


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes its requests.

    Raises as `serve_worker` does.
    """
    packing_config(config)  # before the weights are loaded
    stop = stop_event()
    async with open_vitals(config.telemetry, options.host) as vitals:
        (engine,) = await asyncio.to_thread(open_for, options, config, 1)
        latency = await asyncio.to_thread(prefill_latency, engine, config.engine)
        operators = await asyncio.to_thread(mixed_batches, engine, config.engine)
        loaded = Loaded(role="mixed", engine=engine, latency=latency, vitals=vitals)
        await serve_role(
            options, config, lambda context: MixedRole(context, operators), loaded, stop, on_ready
        )
