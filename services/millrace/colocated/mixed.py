"""Runs `millrace colocated --role mixed`: prefill and decode in one batch (Medha section 4.3).

The event loop owns every request and all pages; the compute thread runs iterations: a token of each
answer and chunks of prompts in one pass. Changes are applied between two iterations. The scheduler
places requests at the instance as at a decode instance, and the instance prefills them itself: no
KV is transferred to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from millrace.colocated.admissions import MixedAdmissions
from millrace.colocated.calibration import mixed_batches
from millrace.colocated.compute import Iteration, MixedCompute
from millrace.colocated.metrics import MixedMetrics
from millrace.colocated.packing import IterationPacker, Plan, packing_config
from millrace.colocated.predictor import Predictor
from millrace.colocated.prompts import Prompts
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
from millrace.core.scheduler.reports import Heartbeat, Registration
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.pace import TokenPace
from millrace.decode.request import DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.decode.servicer import DecodeServicer
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.instance.host import Loaded, WorkerContext, WorkerOptions, open_for, serve_role
from millrace.instance.latency import prefill_latency
from millrace.instance.prefix import cached_blocks
from millrace.instance.shards.kvp_servicer import KvpServicer
from millrace.instance.shards.shard_host import ShardHost
from millrace.instance.shards.shard_table import NOBODY, ShardTable
from millrace.instance.spans import Stopwatch
from millrace.instance.tasks import Tasks, stop_event
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.instance.vitals import open_vitals
from millrace.profiles import decode_step
from millrace.transfer.push.receive.manager import ReceiveManager

log = logging.getLogger(__name__)


class MixedRole:
    """The role of a mixed instance; `_table` has every request that the instance holds."""

    name = "mixed"

    def __init__(self, context: WorkerContext, operators: OperatorModel) -> None:
        """`operators` predict iterations. Raises ConfigError for contradictory settings."""
        self._context = context
        self._pool = context.engine.pool
        self._operators = operators
        self._tasks = Tasks()
        self._pace = TokenPace()
        self._table = RequestTable()
        self._metrics = MixedMetrics(context.registry)
        self._predictor = Predictor(operators)
        metrics = self._decode_metrics = DecodeMetrics(context.registry)
        self._output = Output(context, self._table, metrics)
        self._admissions = MixedAdmissions(
            context, self._table, metrics, self._tasks, self._shard_lost
        )
        self._packer = IterationPacker(
            operators, self._predictor, context.config, self._admissions.most_spread_tokens
        )
        self._prompts = Prompts(context, self._table, self._output, self._packer, self._tasks)
        self._compute = MixedCompute(context.engine, context.config.engine.max_batch)
        self._hosted = ShardTable()
        self._receiver = ReceiveManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.storage,
            identity=context.incarnation,
            config=context.config.transfer,
            callbacks=self._hosted.beside(NOBODY),
        )
        self._host = ShardHost(context, context.engine, self._hosted, self._receiver)
        self._clock = Stopwatch(0.0)  # seconds since the epoch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mixed-compute")

    @property
    def kv_region(self) -> int:
        return self._receiver.region

    @property
    def num_spill_pages(self) -> int:
        """Pages of the pool that the instance reserves for itself, not for requests."""
        return len(self._admissions.spread.spill_pages)

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._admissions.prefix_cache

    def attach(self, server: grpc.aio.Server) -> None:
        DecodeServicer(self._output.streams, self._context.incarnation).add_to(server)
        KvReceiverServicer(self._receiver).add_to(server)
        KvpServicer(self._host).add_to(server)

    def complete_registration(self, base: Registration) -> Registration:
        self.prefix_cache.report_all()
        return replace(
            base,
            kv_pages=base.kv_pages - self.num_spill_pages,
            max_batch=self._context.config.engine.max_batch,
            decode_step=DecodeStepTime.of(decode_step.of_profile(self._operators)),
            block_tokens=self.prefix_cache.block_tokens,
        )

    def counts(self) -> tuple[int, int]:
        running = self._table.counts()[0] + self._prompts.begun
        return running, len(self._table) - running

    def heartbeat(self) -> Heartbeat:
        (running, waiting), tbt_s = self.counts(), self._pace.take_s()
        return Heartbeat(
            free_pages=self._pool.free_pages,
            running=running,
            waiting=waiting,
            tbt_s=tbt_s,
            cached=cached_blocks(self.prefix_cache),
        )

    def on_command(self, command: Command) -> None:
        match command:
            case AdmitDecode():
                self._admissions.admit(command)
            case RunPrefill(request=spec):
                self._prompts.expect(spec.request_id)
            case Registered(policy=name) | PolicyInForce(name=name):
                if name:
                    self._packer.rank_by(name)
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

    def _shard_lost(self, request: DecodeRequest, why: str) -> None:
        self._output.fail(request, why, "transfer")

    async def run(self) -> None:
        self._tasks.spawn(self._host.run())
        self._tasks.spawn(self._output.journal.run())
        self._tasks.spawn(self._iterate_forever())
        await self._tasks.watch()

    async def _iterate_forever(self) -> None:
        loop = asyncio.get_running_loop()
        wake, last = self._table.wake, Iteration()
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
            self._clock.now_s(),
            decodes=len(rows),
            context_tokens=int(rows.kv_lens.sum()),
            tbt_s=self._tightest_tbt_s(),
        )

    def _tightest_tbt_s(self) -> float | None:
        """Returns the tightest TBT objective of the running requests, if any."""
        objectives = [r.spec.slo.tbt_s for r in self._table if r.spec.slo.tbt_s and r.joined]
        return min(objectives, default=None)

    def _take(self, plan: Plan, iteration: Iteration) -> None:
        self._predictor.observe(plan.shape, iteration.seconds)
        self._metrics.iterated(plan, iteration.seconds)
        if plan.shape.decodes:
            self._pace.stepped(time.perf_counter())
            self._decode_metrics.batch.observe(plan.shape.decodes)
            self._decode_metrics.step_s.observe(iteration.seconds)
        for request in self._prompts.take(plan, iteration):
            self._admissions.keep_prefix(request)

    def _let_out(self) -> None:
        for request in self._table.leaving:
            self._prompts.drop(request.id)
            self._compute.batch.remove(request.id)
            self._admissions.release(request)
        self._table.leaving.clear()

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
        self._receiver.check_integrity()
        self._host.check_integrity()
        self._admissions.spread.check_integrity()
        self.prefix_cache.check_integrity()
        self._compute.batch.check_integrity()
        self._prompts.check_integrity()

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await self._output.journal.flush()
        await self._admissions.spread.close_all()
        await self._host.close()
        await self._receiver.close()


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then finishes its requests. Raises as `serve_worker` does."""
    packing_config(config)  # before the weights are loaded
    stop = stop_event()
    async with open_vitals(config.telemetry, options.host) as vitals:
        (engine,) = await asyncio.to_thread(open_for, options, config, 1)
        latency = await asyncio.to_thread(prefill_latency, engine, config.engine)
        operators = await asyncio.to_thread(mixed_batches, engine, config.engine)
        loaded = Loaded(engine=engine, latency=latency, vitals=vitals)
        await serve_role(
            options, config, lambda context: MixedRole(context, operators), loaded, stop, on_ready
        )
