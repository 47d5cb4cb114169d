"""The state that all chunks of a prefill instance share: the engine, the pool, the reports."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from millrace.core.kv.sp_layout import GroupPass
from millrace.core.scheduler.reports import (
    ChunkFinished,
    ChunkStarted,
    ChunkSuspended,
    PromptAdvanced,
    Report,
)
from millrace.engine.assembly import Engine
from millrace.engine.device.publish import LayerPublisher
from millrace.engine.device.run_ahead import Pace
from millrace.engine.execution_pool import ChunkTask, ExecutionPool
from millrace.engine.forward.passes import Boundary
from millrace.engine.sampling.sampler import Sampler
from millrace.prefill.compute.first_tokens import prompt_logprobs, sample_first
from millrace.prefill.job import PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.states import PrefillEvent
from millrace.transfer.ring.chunk_link import Waits


class PrefillCompute:
    """The compute thread's part of a prefill instance, with its reports to the scheduler."""

    def __init__(
        self,
        engine: Engine,
        max_chunk_tokens: int,
        report: Callable[[Report], object],
        metrics: PrefillMetrics,
        pool: ExecutionPool,
        batched_with: Callable[[str], Sequence[str]],
        submit: Callable[[PrefillJob, int], None],
    ) -> None:
        """`batched_with` names the tasks that the scheduler batched with a task; `submit` gives the
        pool a chunk of a job, by the chunk's index.
        """
        self.engine = engine
        self.max_chunk_tokens = max_chunk_tokens
        self.metrics = metrics
        self.pool = pool
        self.batched_with = batched_with
        self._submit = submit
        self._report = report
        self._sampler = Sampler(engine.grammars)
        self.publisher = LayerPublisher(engine.device)

    def close(self) -> None:
        self.publisher.close()

    @contextmanager
    def one_pass(
        self, task: ChunkTask, boundaries: Generator[Boundary], tokens: int
    ) -> Iterator[None]:
        """Runs the block as a forward pass of the task, until its end or until it is dropped."""
        spent_s = task.spent_s()
        task.pace = Pace(tokens)
        try:
            yield
        finally:
            boundaries.close()  # on this thread, which owns what it frees
            self.publisher.flush()  # the pages must outlive the device's work
        self.metrics.compute_s.observe(task.spent_s() - spent_s)
        self.metrics.tokens.inc(tokens)
        self.metrics.device_passes.follow(self.engine.runner.states.prefills)

    def publish(self, job: PrefillJob, one: GroupPass, layer: int, start: int, tokens: int) -> None:
        """Passes a layer of neighbouring tokens of the pass to the job's transfer."""
        if job.session is not None:
            self.publisher.together(
                partial(job.session.layer_ready, one.number, layer, start, tokens)
            )

    def written(self, job: PrefillJob, one: GroupPass, layer: int) -> None:
        """Passes a layer of the pass to the job's transfer, after a later stage has written it. Any
        thread may call it."""
        if job.session is not None:
            job.session.layer_ready(one.number, layer, one.start_token, one.num_tokens)

    def add_prompt_logprobs(self, job: PrefillJob, start: int, hidden: torch.Tensor) -> None:
        """Adds the log-probabilities of the prompt's own tokens, if they are requested.

        hidden: [L, hidden_size] of the positions from `start` on; each gives the probability of
        the next id.
        """
        top = job.sampling.prompt_logprobs
        if top < 0:
            return
        run = prompt_logprobs(self.engine.runner, top, job.prompt_ids, start, hidden)
        job.prompt_logprobs.append(run)

    def sample(self, job: PrefillJob, logits: torch.Tensor) -> None:
        """Samples the first token of every choice from float32 [vocab].

        Raises SamplingError if none can be sampled.
        """
        job.first_tokens = sample_first(self._sampler, job.sampling, job.prompt_ids, logits)

    # -- reports to the scheduler

    def started(self, job: PrefillJob, chunk: int) -> None:
        """Reports that a chunk starts or resumes."""
        job.go_on(self.metrics)
        if job.leads:
            self._report(ChunkStarted(request_id=job.request_id, chunk_index=chunk))

    def passed_over(self, job: PrefillJob) -> None:
        """Reports the cached chunks before the first computed chunk as finished."""
        for chunk in range(job.first_chunk):
            self._report(ChunkFinished(request_id=job.request_id, chunk_index=chunk))

    def suspended(
        self,
        job: PrefillJob,
        chunk: int,
        compute_s: float,
        event: PrefillEvent = PrefillEvent.PREEMPT,
    ) -> None:
        """Reports that the chunk was suspended for another task."""
        job.suspend(event)
        if job.leads:
            self._report(
                ChunkSuspended(request_id=job.request_id, chunk_index=chunk, compute_s=compute_s)
            )

    def advanced(self, job: PrefillJob, one: GroupPass) -> None:
        """Reports that a pass is computed, if nobody else reports so."""
        done = one.start_token + one.num_tokens
        if job.tells_passes and job.steps.is_due(done, job.prompt_tokens):
            self._report(
                PromptAdvanced(request_id=job.request_id, attempt=job.attempt, tokens=done)
            )

    def finished(
        self, job: PrefillJob, chunk: int, compute_s: float, waits: Waits | None = None
    ) -> None:
        """Reports that the chunk is computed, and submits the job's next chunk or ends the job.

        `waits`: share of `compute_s`, in a group.
        """
        job.advance(PrefillEvent.END_CHUNK)
        is_last = chunk + 1 == len(job.chunks)
        if job.leads:
            self.metrics.chunks.inc()
            finished = ChunkFinished(
                request_id=job.request_id,
                chunk_index=chunk,
                compute_s=compute_s,
                last=is_last,
                ring_wait_s=0.0 if waits is None else waits.blocks_s,
                history_wait_s=0.0 if waits is None else waits.history_s,
            )
            self._report(finished)
        if is_last:
            job.done(None)
        else:  # now, so that it is in the pool before the pool chooses its next task
            self._submit(job, chunk + 1)
