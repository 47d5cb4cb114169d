"""Runs the prefill instance: take commands, prepare, compute, hand over, release.

Every job runs as its own asyncio task. Jobs are prepared one at a time, in the order of the
commands or in the scheduler's later order. Prepared chunks go into the execution pool, which runs
the first ready chunk in that order and preempts it for a chunk that comes earlier in the order. So
an unprepared job never delays a prepared job, and while a job computes, the next jobs already have
their prompts, pages and handshakes: the compute thread never waits for the scheduler, the store or
a peer. A cancelled job stops at once, or after the running operator.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import grpc

from millrace.core.errors import CapacityError, MillraceError
from millrace.core.incarnation import Incarnation
from millrace.core.instance.group import GroupError
from millrace.core.instance.standstill import Standstill
from millrace.core.scheduler.commands import Cancel, Command, Drain, Order, Registered, RunPrefill
from millrace.core.scheduler.reports import (
    CachedBlocks,
    Heartbeat,
    Registration,
    RequestFailed,
    RequestReleased,
)
from millrace.core.token_events import FinishedPrefill, PositionLogprobs
from millrace.engine.errors import EngineDied
from millrace.engine.execution_pool import ChunkTask, ExecutionPool, StopPoint
from millrace.instance.prefix import cached_blocks
from millrace.instance.role import WorkerContext
from millrace.instance.spans import of_request
from millrace.instance.tasks import Tasks
from millrace.prefill.compute.context import PrefillCompute
from millrace.prefill.compute.local_chunk import LocalChunk
from millrace.prefill.compute.ring_chunk import RingChunk
from millrace.prefill.failures import ComputeError, failure_of, label_of
from millrace.prefill.group.membership import Membership
from millrace.prefill.job import Cancelled, PrefillJob, request_of, task_name, task_names
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.prefix import PromptPrefixes
from millrace.prefill.priority_lock import PriorityLock
from millrace.prefill.prompt import fetch_prompt
from millrace.prefill.results import Results
from millrace.prefill.sending import open_session, trace_exchanged, trace_sent, transfer_spans
from millrace.prefill.states import PrefillEvent
from millrace.transfer.push.control import Sending
from millrace.transfer.push.send.manager import SendManager
from millrace.wire.clients.kv_peer import KvPeers

log = logging.getLogger(__name__)


class PrefillRole:
    """The role of a prefill instance; `_jobs` has all its jobs in the order of execution."""

    name = "prefill"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._id = context.incarnation.id
        self._engine = context.engine
        self._pool = context.engine.pool
        self._jobs: dict[str, PrefillJob] = {}
        self._prepare_turn = PriorityLock(self._jobs)
        self._together: dict[str, tuple[str, ...]] = {}  # tasks that the scheduler batched
        self._changed = asyncio.Event()  # pages came free, or the order changed
        self._tasks = Tasks()
        self._peers = KvPeers()
        self._metrics = PrefillMetrics(context.registry)
        self._sender = SendManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.storage,
            identity=context.incarnation,
            config=context.config.transfer,
        )
        self._results = Results(context, self._metrics, self._proxy_gone)
        self._prefixes = PromptPrefixes(context, self._metrics)
        self.prefix_cache = self._prefixes.cache
        self._membership = Membership(context, self._peers, self._sender.region, self._broken)
        self._execution = ExecutionPool(
            context.engine.device,
            most_held=context.config.engine.max_suspended,
            blocked=self._metrics.blocking_s.observe,
            send=self._membership.say,
        )
        self._membership.listen(self._execution.receive)
        self._metrics.watch(self._execution)
        self._compute = PrefillCompute(
            context.engine,
            context.config.engine.max_chunk_tokens,
            context.send_threadsafe,
            self._metrics,
            self._execution,
            batched_with=lambda task: self._together.get(task, ()),
            submit=self._submit,
        )

    @property
    def kv_region(self) -> int:
        return self._sender.region

    def attach(self, server: grpc.aio.Server) -> None:
        self._membership.attach(server)
        self._results.attach(server)

    def complete_registration(self, base: Registration) -> Registration:
        self.prefix_cache.report_all()
        return replace(
            base,
            kv_layers=self._engine.layout.buffer_layers,
            block_tokens=self.prefix_cache.block_tokens,
        )

    def counts(self) -> tuple[int, int]:
        running = min(int(self._execution.is_running), len(self._jobs))  # its job may be gone
        return running, len(self._jobs) - running

    def heartbeat(self) -> Heartbeat:
        running, waiting = self.counts()
        return Heartbeat(
            free_pages=self._pool.free_pages,
            running=running,
            waiting=waiting,
            standstill=self._standstill(),
        )

    def cached_blocks(self) -> CachedBlocks | None:
        return cached_blocks(self.prefix_cache)

    def _standstill(self) -> Standstill | None:
        """Reports why prepared tasks wait, if no operator has begun since the last heartbeat."""
        if (found := self._execution.standstill()) is None:
            return None
        prepared, claimed, waits_for = found
        return Standstill(
            prepared=tuple(sorted({request_of(task) for task in prepared})),
            claimed=request_of(claimed),
            waits_for=waits_for,
        )

    def sending(self, request_id: str) -> Sending | None:
        """Returns the session that sends a request's KV; None before it is open and after the
        release.
        """
        job = self._jobs.get(request_id)
        return None if job is None else job.session

    async def wait_idle(self) -> None:
        while self._jobs:
            self._changed.clear()
            await self._changed.wait()

    def on_command(self, command: Command) -> None:
        match command:
            case RunPrefill():
                self._engine.grammars.begin(command.request.sampling)
                self._begin(PrefillJob.of(command, self._id, self._context.tracer))
            case Order():
                self._reorder(command)
            case Registered(preemption=preemption):
                self._execution.set_granularity(StopPoint.of(preemption or "none"))
            case Cancel(request_id=request_id, reason=reason):
                if (job := self._jobs.get(request_id)) is not None:
                    self._cancel(job, reason or "cancelled")
            case Drain(abort=abort):
                self._evict(abort=abort)

    def _begin(self, job: PrefillJob) -> None:
        self._jobs[job.request_id] = job
        self._execution.append(task_names(job))
        self._tasks.spawn(self._serve(job))

    def _cancel(self, job: PrefillJob, reason: str) -> None:
        """Cancels a job: a computing job checks for it; a waiting job is dropped from the pool."""
        job.cancel(reason)
        self._execution.drop_unwanted()

    def _proxy_gone(self, proxy: Incarnation) -> None:
        for job in self._jobs.values():
            if job.prefill_only and job.command.request.proxy == proxy:
                self._cancel(job, f"proxy {proxy.id} is gone")

    def _evict(self, *, abort: bool) -> None:
        """Drops every job: with `abort` by an error, else for a retry at another instance."""
        reason = "the instance had to let go of its requests"
        for job in self._jobs.values():
            if abort:
                failed = RequestFailed(request_id=job.request_id, message=reason, retryable=False)
                self._context.send(failed)
            self._cancel(job, reason)

    def _broken(self, request_id: str, attempt: int, error: GroupError) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.attempt == attempt:
            job.fail(error)
            self._execution.drop_unwanted()

    def _reorder(self, order: Order) -> None:
        """Puts the jobs into this order; unnamed jobs are already computed and come last.

        A job is prepared in the place of its first chunk. Each chunk has its own place.
        """
        entries = [
            tuple(task_name(ref.request_id, ref.chunk_index) for ref in entry)
            for entry in order.queue
        ]
        self._together = {name: entry for entry in entries if len(entry) > 1 for name in entry}
        names = [name for entry in entries for name in entry]
        self._execution.order(names)
        named = dict.fromkeys(ref.request_id for entry in order.queue for ref in entry)
        if self._engine.runner.in_flight is not None:
            self._engine.runner.in_flight.order(list(named))
        jobs = {name: self._jobs.pop(name) for name in named if name in self._jobs}
        jobs.update(self._jobs)
        self._jobs.clear()
        self._jobs.update(jobs)
        self._changed.set()

    async def run(self) -> None:
        await self._tasks.watch()

    async def drop_all(self, reason: str) -> None:
        for job in self._jobs.values():
            self._cancel(job, reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=0)
        self.prefix_cache.check_integrity()
        self._sender.check_integrity()
        self._membership.check_integrity()

    async def close(self) -> None:
        for job in self._jobs.values():
            job.cancel("the instance is shutting down")
        await asyncio.to_thread(self._execution.close)
        await asyncio.to_thread(self._compute.close)
        await self._tasks.cancel()
        await self._sender.close()
        await self._membership.close()
        await self._peers.close()

    # -- one job

    async def _serve(self, job: PrefillJob) -> None:
        reason = ""
        died: EngineDied | None = None
        try:
            await self._work(job)
        except Cancelled as cancelled:
            reason = str(cancelled)
            self._metrics.cancelled.inc()
        except MillraceError as error:
            reason = str(error)
            job.fail(error)
            self._metrics.failed.labels(label_of(error)).inc()
            self._context.send(failure_of(job, error))
            died = error if isinstance(error, EngineDied) else None
        if reason and job.link is not None:
            job.link.abort()  # else closing would wait for ever
        if job.session is not None:
            await job.session.abort(reason)
            self._metrics.sent(job.session)
            trace_sent(job, job.session)
        if job.link is not None:
            await job.link.close()
            self._metrics.exchanged(job.link)
            trace_exchanged(job, job.link)
        self._membership.end(job)
        self._pool.free(job.pages + job.buffers)
        self._execution.forget(task_names(job))
        job.advance(PrefillEvent.RELEASE)
        del self._jobs[job.request_id]
        self._changed.set()
        job.end_trace(reason)
        released = RequestReleased(request_id=job.request_id, complete=not reason)
        self._context.send(released)
        if died is not None:
            raise died  # the engine can't compute any more

    async def _work(self, job: PrefillJob) -> None:
        """Prepares, computes and hands over the job. Raises Cancelled and MillraceError."""
        with job.cancellable():
            await self._prepare(job)
            if job.layout is not None:
                asked_s = job.now_s()
                await self._membership.meet(job)
                job.met_s = job.now_s()
                job.trace.trace("group_join", asked_s, job.met_s, members=len(job.members))
        job.advance(PrefillEvent.READY)
        await self._run_compute(job)
        job.advance(PrefillEvent.END_COMPUTE)
        self._prefixes.keep(job)
        with job.cancellable():
            finished = None
            if job.leads:
                logprobs = await self._membership.collect(job)
                if job.session is None:
                    self._results.send(job, logprobs)
                else:
                    finished = self._finished(job, job.session, logprobs)
            else:
                await self._membership.hand_in(job)
            if job.session is not None:
                await job.session.finish(finished)

    async def _prepare(self, job: PrefillJob) -> None:
        """Fetches the prompt, reserves pages, cuts the passes and opens the handshake."""
        async with self._prepare_turn.of(job.request_id):
            if job.is_shared:
                await self._lay_out(job)
            job.prompt_ids = await fetch_prompt(self._context.store, job)
            await self._reserve(job)
            job.cut(self._compute.max_chunk_tokens)
            job.session = await open_session(self._sender, self._peers, job)
            self._prefixes.hand_over(job)

    async def _lay_out(self, job: PrefillJob) -> None:
        sizes = self._engine.layout.page_tokens, self._compute.max_chunk_tokens
        try:
            await asyncio.to_thread(job.lay_out, *sizes)
        except ValueError as error:
            raise ComputeError(f"request {job.request_id}: {error}") from error

    async def _reserve(self, job: PrefillJob) -> None:
        """Waits until the job's pages are free and takes them; earlier jobs take theirs first."""
        own, buffers = job.pages_needed(self._engine.layout)
        needed = own + buffers
        if needed > self._pool.num_pages:
            raise CapacityError(
                f"request {job.request_id} needs {needed} KV pages; there are "
                f"{self._pool.num_pages}"
            )
        blocks = self._prefixes.wanted(job)
        cached = self.prefix_cache.take(blocks)
        while self._pool.free_pages < needed - len(cached):
            self._pool.free(cached)
            self._changed.clear()
            await self._changed.wait()
            await self._prepare_turn.give_way(job.request_id)
            cached = self.prefix_cache.take(blocks)
        taken = cached + self._pool.allocate(needed - len(cached))
        job.pages, job.buffers = taken[:own], taken[own:]
        self._prefixes.found(job, cached)

    async def _run_compute(self, job: PrefillJob) -> None:
        """Lets the pool compute the job. `cancel` can't interrupt this wait; the pool ends it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        job.done = lambda error: loop.call_soon_threadsafe(_resolve, done, error)
        try:
            if job.layout is None:
                self._compute.passed_over(job)
            self._submit(job, job.first_chunk)
            await done
        except (Cancelled, MillraceError):
            raise
        except Exception as error:
            about = of_request(job.command.request)
            log.exception("request %s: prefill failed", job.request_id, extra=about)
            raise ComputeError(f"prefill failed: {error}") from error
        if job.leads and not (job.first_tokens or job.prefill_only):
            raise ComputeError(f"request {job.request_id}: the last chunk gave no logits")

    def _submit(self, job: PrefillJob, chunk: int) -> None:
        """Gives a chunk to the pool after all chunks before it are computed. On any thread."""
        shares = job.shares(chunk)
        task: ChunkTask
        if shares is None:
            task = LocalChunk(self._compute, job, chunk)
        else:
            assert job.link is not None  # all members have joined
            job.link.give(shares)
            task = RingChunk(self._compute, job, chunk, shares)
        self._execution.submit(task)

    def _finished(
        self, job: PrefillJob, session: Sending, logprobs: tuple[PositionLogprobs | None, ...]
    ) -> FinishedPrefill:
        return FinishedPrefill(
            first_tokens=job.first_tokens,
            spans=(*job.trace.take(), *transfer_spans(job, session)),
            prompt_logprobs=logprobs,
            total_chunks=job.num_passes,
            cached_tokens=job.cached_tokens,
        )


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return  # the whole process ends
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
