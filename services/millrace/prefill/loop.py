"""The prefill instance: take commands, prepare, compute, hand over, release.

Jobs run in the order of the commands. While one computes, the next one already has its prompt, its
pages and its handshake, so the compute thread never waits for the scheduler, the store or a peer.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from millrace.core.errors import MillraceError, TransferError
from millrace.prefill.compute import Cancelled, PrefillCompute, PrefillOutcome
from millrace.prefill.job import PrefillJob
from millrace.transfer.send_manager import SendManager
from millrace.wire.kv_peer import KvPeers
from millrace.wire.pb import common_pb2, scheduler_pb2, transfer_pb2
from millrace.worker.codec import logprobs_message, span
from millrace.worker.host import WorkerContext
from millrace.worker.link import request_failed, request_released

log = logging.getLogger(__name__)


class PrefillRole:
    """Everything an instance holds for its requests is in `_jobs`."""

    name = "prefill"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._pool = context.engine.pool
        self._jobs: dict[str, PrefillJob] = {}
        self._to_prepare: asyncio.Queue[PrefillJob] = asyncio.Queue()
        self._to_compute: asyncio.Queue[tuple[PrefillJob, torch.Tensor]] = asyncio.Queue(maxsize=1)
        self._pages_changed = asyncio.Condition()
        self._endings: set[asyncio.Task[None]] = set()
        self._peers = KvPeers()
        self._sender = SendManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.pool.storage,
            identity=(context.incarnation.id, context.incarnation.generation),
            config=context.config.transfer,
        )
        self._compute = PrefillCompute(
            context.engine,
            context.incarnation.id,
            context.config.engine.max_chunk_tokens,
            context.send_threadsafe,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill-compute")

    def attach(self, server: grpc.aio.Server) -> None:
        """A prefill instance offers no services beside health."""

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        register.role = self.name

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        return scheduler_pb2.Heartbeat(
            free_pages=self._pool.free_pages,
            running=min(1, len(self._jobs)),
            waiting=max(0, len(self._jobs) - 1),
        )

    async def wait_idle(self) -> None:
        async with self._pages_changed:
            await self._pages_changed.wait_for(lambda: not self._jobs)

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "run_prefill":
            job = PrefillJob.of(command.run_prefill)
            self._jobs[job.request_id] = job
            self._to_prepare.put_nowait(job)
        elif kind == "cancel":
            self._cancel(command.cancel.request_id, command.cancel.reason or "cancelled")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prepare_jobs())
            group.create_task(self._compute_jobs())

    async def drop_all(self, reason: str) -> None:
        for request_id in list(self._jobs):
            self._cancel(request_id, reason)
        await self.wait_idle()

    async def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        await self._sender.close()
        await self._peers.close()
        self._pool.check_integrity(expected_used=0)

    # -- the three stages

    async def _prepare_jobs(self) -> None:
        """Fetches the prompt, reserves pages and opens the handshake, one job after the other."""
        while True:
            job = await self._to_prepare.get()
            try:
                prompt_ids = await self._prepare(job)
            except (MillraceError, grpc.aio.AioRpcError) as error:
                self._end(job, failure=str(error), retryable=True)
                continue
            if job.cancelled:
                self._end(job)
            else:
                await self._to_compute.put((job, prompt_ids))

    async def _prepare(self, job: PrefillJob) -> torch.Tensor:
        ids = await self._context.store.prompt_ids(job.request_id)
        needed = self._engine.layout.pages_for(job.prompt_tokens)
        async with self._pages_changed:
            await self._pages_changed.wait_for(
                lambda: bool(job.cancelled) or self._pool.free_pages >= needed
            )
            if job.cancelled:
                return torch.empty(0, dtype=torch.int64)
            job.pages = self._pool.allocate(needed)
        target = job.command.decode
        job.session = await self._sender.open(
            job.request_id,
            peer=self._peers.to(target.address),
            receiver=(target.incarnation.id, target.incarnation.generation),
            prompt_tokens=job.prompt_tokens,
            pages=job.pages,
        )
        return torch.from_numpy(ids).to(torch.int64)

    async def _compute_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job, prompt_ids = await self._to_compute.get()
            started_s = job.clock.now_s()
            job.spans.append(
                span("queued", "scheduler", 0.0, job.received_s),
            )
            job.spans.append(
                span("waiting", self._context.incarnation.id, job.received_s, started_s)
            )
            try:
                outcome = await loop.run_in_executor(
                    self._thread, self._compute.run, job, prompt_ids
                )
            except Cancelled:
                self._end(job)
            except Exception as error:
                log.exception("request %s: prefill failed", job.request_id)
                self._end(job, failure=f"prefill failed: {error}", retryable=False)
            else:
                self._end(job, outcome=outcome)

    def _end(
        self,
        job: PrefillJob,
        *,
        outcome: PrefillOutcome | None = None,
        failure: str = "",
        retryable: bool = False,
    ) -> None:
        """Hands over or gives up in the background; the next job computes meanwhile."""
        task = asyncio.create_task(self._finish(job, outcome, failure, retryable))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _finish(
        self, job: PrefillJob, outcome: PrefillOutcome | None, failure: str, retryable: bool
    ) -> None:
        try:
            if outcome is not None and job.session is not None and not job.cancelled:
                await job.session.finish(self._finish_message(job, outcome))
            elif job.session is not None:
                await job.session.abort(failure or job.cancelled)
        except TransferError as error:
            failure, retryable = str(error), True
            if job.session is not None:
                await job.session.abort(failure)
        finally:
            await self._release(job)
        if failure and not job.cancelled:
            log.warning("request %s: %s", job.request_id, failure)
            self._context.send(request_failed(job.request_id, failure, retryable=retryable))
        self._context.send(request_released(job.request_id))

    async def _release(self, job: PrefillJob) -> None:
        async with self._pages_changed:
            if job.pages:
                self._pool.free(job.pages)
                job.pages = []
            self._jobs.pop(job.request_id, None)
            self._pages_changed.notify_all()

    def _finish_message(
        self, job: PrefillJob, outcome: PrefillOutcome
    ) -> transfer_pb2.FinishPrefillRequest:
        return transfer_pb2.FinishPrefillRequest(
            first_tokens=[
                transfer_pb2.FirstToken(token_id=token, logprobs=logprobs_message(logprobs))
                for token, logprobs in zip(outcome.token_ids, outcome.logprobs, strict=True)
            ],
            spans=job.spans,
            prompt_logprobs=[
                common_pb2.PositionLogprobs(),
                *(m for p in outcome.prompt_logprobs if (m := logprobs_message(p)) is not None),
            ]
            if job.sampling.prompt_logprobs >= 0
            else [],
            total_chunks=outcome.passes,
        )

    def _cancel(self, request_id: str, reason: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and not job.cancelled:
            job.cancelled = reason
            wake = asyncio.create_task(self._wake())
            self._endings.add(wake)
            wake.add_done_callback(self._endings.discard)

    async def _wake(self) -> None:
        async with self._pages_changed:
            self._pages_changed.notify_all()
