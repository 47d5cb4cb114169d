"""The prefill instance: take commands, prepare, compute, hand over, release.

A task a job. Jobs are prepared one by one and computed one by one, in the order of the commands
until the scheduler tells another; a job that is next and not yet prepared holds up none that is,
and one that computes is not interrupted. While one job computes, the next one already has its
prompt, its pages and its handshake, so the compute thread never waits for the scheduler, the store
or a peer. A cancelled job leaves whatever it is in at once, bar an operator that runs.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from millrace.core.errors import CapacityError, MillraceError, TransferError
from millrace.prefill.compute import PrefillCompute, PrefillOutcome
from millrace.prefill.job import Cancelled, PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.turns import OrderedTurn
from millrace.state.store import StoreError
from millrace.transfer.send_manager import SendManager, SendSession
from millrace.wire.kv_peer import KvPeers
from millrace.wire.pb import common_pb2, scheduler_pb2, transfer_pb2
from millrace.worker.codec import logprobs_message, span
from millrace.worker.host import WorkerContext
from millrace.worker.link import request_failed, request_released
from millrace.worker.tasks import Tasks

log = logging.getLogger(__name__)


class ComputeError(MillraceError):
    """A prompt's computation failed, and would anywhere."""


class PrefillRole:
    """Everything an instance holds for its requests is in `_jobs`, in the order they are to go."""

    name = "prefill"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._id = context.incarnation.id
        self._engine = context.engine
        self._pool = context.engine.pool
        self._jobs: dict[str, PrefillJob] = {}
        self._prepare_turn = OrderedTurn(self._jobs)
        self._compute_turn = OrderedTurn(self._jobs)
        self._changed = asyncio.Event()  # pages came free, or the order is another
        self._tasks = Tasks()
        self._peers = KvPeers()
        self._metrics = PrefillMetrics(context.registry)
        self._sender = SendManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.pool.storage,
            identity=(context.incarnation.id, context.incarnation.generation),
            config=context.config.transfer,
        )
        self._compute = PrefillCompute(
            context.engine,
            self._id,
            context.config.engine.max_chunk_tokens,
            context.send_threadsafe,
            self._metrics,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill-compute")

    def attach(self, server: grpc.aio.Server) -> None:
        """A prefill instance offers no services beside health."""

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        register.role = self.name

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        running = sum(job.computing for job in self._jobs.values())
        return scheduler_pb2.Heartbeat(
            free_pages=self._pool.free_pages, running=running, waiting=len(self._jobs) - running
        )

    async def wait_idle(self) -> None:
        while self._jobs:
            self._changed.clear()
            await self._changed.wait()

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "run_prefill":
            job = PrefillJob.of(command.run_prefill)
            self._jobs[job.request_id] = job
            self._tasks.spawn(self._serve(job))
        elif kind == "order":
            self._reorder(command.order)
        elif kind == "cancel" and (found := self._jobs.get(command.cancel.request_id)):
            found.cancel(command.cancel.reason or "cancelled")

    def _reorder(self, order: scheduler_pb2.Order) -> None:
        """Puts the jobs into this order; what it does not name is computed already and comes last.

        A job stands where the first of its chunks stands: it computes them all in one turn.
        """
        named = dict.fromkeys(ref.request_id for entry in order.queue for ref in entry.chunks)
        jobs = {name: self._jobs.pop(name) for name in named if name in self._jobs}
        jobs.update(self._jobs)
        self._jobs.clear()
        self._jobs.update(jobs)
        self._changed.set()

    async def run(self) -> None:
        await self._tasks.watch()

    async def drop_all(self, reason: str) -> None:
        for job in self._jobs.values():
            job.cancel(reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=0)
        self._sender.check_integrity()

    async def close(self) -> None:
        for job in self._jobs.values():
            job.cancel("the instance is shutting down")
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self._compute.close)
        await self._tasks.cancel()
        await self._sender.close()
        await self._peers.close()

    # -- a job's life

    async def _serve(self, job: PrefillJob) -> None:
        reason = ""
        try:
            await self._work(job)
        except Cancelled:
            reason = job.cancelled
            self._metrics.cancelled.inc()
        except MillraceError as error:
            reason = str(error)
            self._report(job, error)
        if job.session is not None:
            await job.session.abort(reason)
            self._metrics.sent(job.session)
        self._pool.free(job.pages)
        del self._jobs[job.request_id]
        self._changed.set()
        self._context.send(request_released(job.request_id))

    async def _work(self, job: PrefillJob) -> None:
        """Raises Cancelled, or MillraceError when the job can't be done."""
        with job.cancellable():
            prompt_ids, session = await self._prepare(job)
            await self._compute_turn.acquire(job.request_id)
        try:
            outcome = await self._run_compute(job, prompt_ids)
        finally:
            self._compute_turn.release()
        with job.cancellable():
            await session.finish(self._finish_message(job, session, outcome))

    async def _prepare(self, job: PrefillJob) -> tuple[torch.Tensor, SendSession]:
        """Fetches the prompt, reserves pages and opens the handshake."""
        async with self._prepare_turn.of(job.request_id):
            ids = await self._context.store.prompt_ids(job.request_id)
            if len(ids) != job.prompt_tokens:
                raise StoreError(
                    f"request {job.request_id}: the store has {len(ids)} of "
                    f"{job.prompt_tokens} prompt ids"
                )
            await self._reserve(job)
            target = job.command.decode
            job.session = await self._sender.open(
                job.request_id,
                peer=self._peers.to(target.address),
                receiver=(target.incarnation.id, target.incarnation.generation),
                prompt_tokens=job.prompt_tokens,
                pages=job.pages,
            )
        return torch.from_numpy(ids).to(torch.int64), job.session

    async def _reserve(self, job: PrefillJob) -> None:
        """Waits until the prompt's pages are free and takes them, unless others are to go first."""
        needed = self._engine.layout.pages_for(job.prompt_tokens)
        if needed > self._pool.num_pages:
            raise CapacityError(
                f"request {job.request_id} needs {needed} KV pages; there are "
                f"{self._pool.num_pages}"
            )
        while self._pool.free_pages < needed:
            self._changed.clear()
            await self._changed.wait()
            await self._prepare_turn.give_way(job.request_id)
        job.pages = self._pool.allocate(needed)

    async def _run_compute(self, job: PrefillJob, prompt_ids: torch.Tensor) -> PrefillOutcome:
        """Has the compute thread do the job. Not interrupted: the thread looks for `cancelled`."""
        started_s = job.clock.now_s()
        job.spans.append(span("queued", "scheduler", 0.0, job.received_s))
        job.spans.append(span("waiting", self._id, job.received_s, started_s))
        self._metrics.wait_s.observe(started_s - job.received_s)
        job.computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._compute.run, job, prompt_ids
            )
        except (Cancelled, MillraceError):
            raise
        except Exception as error:
            log.exception("request %s: prefill failed", job.request_id)
            raise ComputeError(f"prefill failed: {error}") from error
        finally:
            job.computing = False

    def _report(self, job: PrefillJob, error: MillraceError) -> None:
        """Tells the scheduler at once; the release follows when nothing is in flight any more."""
        reasons = ((StoreError, "store"), (TransferError, "transfer"), (CapacityError, "capacity"))
        reason = next((name for kind, name in reasons if isinstance(error, kind)), "compute")
        self._metrics.failed.labels(reason).inc()
        log.warning("request %s: %s", job.request_id, error)
        retryable = not isinstance(error, ComputeError)
        self._context.send(request_failed(job.request_id, str(error), retryable=retryable))

    def _finish_message(
        self, job: PrefillJob, session: SendSession, outcome: PrefillOutcome
    ) -> transfer_pb2.FinishPrefillRequest:
        prompt_logprobs = []
        if job.sampling.prompt_logprobs >= 0:
            found = (logprobs_message(p) for p in outcome.prompt_logprobs)
            prompt_logprobs = [common_pb2.PositionLogprobs(), *(m for m in found if m is not None)]
        return transfer_pb2.FinishPrefillRequest(
            first_tokens=[
                transfer_pb2.FirstToken(token_id=token, logprobs=logprobs_message(logprobs))
                for token, logprobs in zip(outcome.token_ids, outcome.logprobs, strict=True)
            ],
            spans=[*job.spans, *self._transfer_spans(job, session)],
            prompt_logprobs=prompt_logprobs,
            total_chunks=outcome.passes,
        )

    def _transfer_spans(self, job: PrefillJob, session: SendSession) -> list[common_pb2.Span]:
        """The handshake, and the transfer as far as it has come: decode knows when it ended.

        What has not happened yet happens from now on.
        """
        now_s, timings = job.clock.now_s(), session.timings
        granted_s, first_write_s = (
            job.since_monotonic_s(t) if t else now_s
            for t in (timings.granted_s, timings.first_write_s)
        )
        opened_s = job.since_monotonic_s(timings.opened_s)
        return [
            span("kv_handshake", self._id, opened_s, granted_s),
            span(
                "kv_transfer",
                self._id,
                first_write_s,
                now_s,
                to=session.ticket.receiver.id,
            ),
        ]
