"""Computes the entries of a prefill instance's run queue, pass by pass, on the compute thread.

An entry is a chunk of one prompt, or whole prompts computed together (FlowPrefill, Algorithm 1).
Each runs as a task of the execution pool: a generator that yields at operator boundaries. An SP
group's chunk is a `gang_entry.GangEntry`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from millrace.core.scheduler.reports import ChunkFinished, ChunkStarted, ChunkSuspended, Report
from millrace.engine.assembly import Engine
from millrace.engine.completion import Completion
from millrace.engine.execution_pool import ExecutionPool, PoolTask, StopPoint
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.sampling.sampler import Sampler
from millrace.prefill.compute.first_tokens import SamplingError, prompt_logprobs, sample_first
from millrace.prefill.compute.publish import LayerPublisher
from millrace.prefill.compute.work import Part, Work, task_name
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
    ) -> None:
        self.engine = engine
        self.max_chunk_tokens = max_chunk_tokens
        self.metrics = metrics
        self.pool = pool
        self._report = report
        self._sampler = Sampler()
        self.publisher = LayerPublisher(engine.device)

    def close(self) -> None:
        self.publisher.close()

    @contextmanager
    def one_pass(
        self, task: PoolTask, boundaries: Generator[Boundary], tokens: int
    ) -> Iterator[None]:
        """Runs the block as a forward pass of the task, until its end or until it is dropped."""
        spent_s = task.spent_s()
        try:
            yield
        finally:
            boundaries.close()  # on this thread, which owns what it frees
            self.publisher.flush()  # the pages must outlive the device's work
        self.metrics.compute_s.observe(task.spent_s() - spent_s)
        self.metrics.tokens.inc(tokens)

    def publish(self, part: Part, layer: int, start: int, tokens: int) -> None:
        """Passes a layer of neighbouring tokens of the part to its transfer."""
        session = part.work.job.session
        if session is not None and part.error is None:
            self.publisher.after_device(
                partial(session.layer_ready, part.number, layer, start, tokens)
            )

    def add_prompt_logprobs(self, work: Work, start: int, hidden: torch.Tensor) -> None:
        """Adds the log-probabilities of the prompt's own tokens.

        hidden: [L, hidden_size] of the positions from `start` on; each gives the probability of
        the next id.
        """
        top = work.job.sampling.prompt_logprobs
        run = prompt_logprobs(self.engine.runner, top, work.prompt_ids, start, hidden)
        work.prompt_logprobs.append(run)

    def sample(self, part: Part, logits: torch.Tensor) -> None:
        """Samples the first token of every choice from float32 [vocab]; sets the part's error if
        none can be sampled."""
        work = part.work
        try:
            work.outcome = sample_first(self._sampler, work.job.sampling, work.prompt_ids, logits)
        except SamplingError as error:  # fails this prompt only, not its batch
            part.error = error

    # -- reports to the scheduler

    def started(self, part: Part) -> None:
        """Reports that a chunk starts or resumes."""
        job = part.work.job
        job.go_on(self.metrics)
        if job.leads:
            self._report(ChunkStarted(request_id=job.request_id, chunk_index=part.chunk))

    def passed_over(self, work: Work) -> None:
        """Reports the cached chunks before the first computed chunk as finished."""
        for chunk in range(work.first_chunk):
            self._report(ChunkFinished(request_id=work.job.request_id, chunk_index=chunk))

    def suspended(
        self, part: Part, compute_s: float, event: PrefillEvent = PrefillEvent.PREEMPT
    ) -> None:
        """Reports that the chunk was suspended for another task."""
        job = part.work.job
        job.suspend(event)
        if job.leads:
            self._report(
                ChunkSuspended(
                    request_id=job.request_id, chunk_index=part.chunk, compute_s=compute_s
                )
            )

    def finished(self, part: Part, compute_s: float, waits: Waits | None = None) -> None:
        """Reports that the part ended its chunk. `waits`: share of `compute_s`, in a group."""
        job = part.work.job
        job.advance(PrefillEvent.END_CHUNK)
        if job.leads:
            self.metrics.chunks.inc()
            finished = ChunkFinished(
                request_id=job.request_id,
                chunk_index=part.chunk,
                compute_s=compute_s,
                last=part.work.is_last(part),
                ring_wait_s=0.0 if waits is None else waits.blocks_s,
                history_wait_s=0.0 if waits is None else waits.history_s,
            )
            self._report(finished)


class Entry:
    """An entry of the run queue: one job's chunk, and the chunks that are computed with it.

    `fellows` names the tasks that the scheduler batched with this task. Those that are ready when
    this task begins join it; the others run alone. An unwanted job leaves at the end of the pass,
    which still writes its pages; if all jobs of the pass are unwanted, the pass ends at once.
    `follow` gets the work and the number of its next chunk after a chunk.
    """

    def __init__(
        self,
        compute: PrefillCompute,
        work: Work,
        chunk: int,
        fellows: Callable[[str], Sequence[str]],
        follow: Callable[[Work, int], None],
    ) -> None:
        self._compute = compute
        self._fellows = fellows
        self._follow = follow
        self._open = work.of_chunk(chunk)  # parts still to be computed, in their order
        self._now: list[Part] = []  # in the current pass
        self._leave_by = PrefillEvent.PREEMPT  # how the pass leaves this stage at its boundary
        self.task = PoolTask(
            name=task_name(work.job.request_id, chunk),
            steps=self._steps(),
            resumed=self._resumed,
            suspended=self._suspended,
            ended=self._ended,
            is_unwanted=self._is_unwanted,
            subject=self,
        )

    # -- the generator: this class runs on the pool's thread

    def _steps(self) -> Generator[StopPoint | Completion]:
        self._join()
        while self._open:
            self._now = self._next_pass()
            yield from self._run_pass()
            now, self._now = self._now, []
            for part in now:
                self._open.remove(part)
                self._close(part)
            if self._open:
                yield StopPoint.PASS

    def _join(self) -> None:
        names = self._fellows(self.task.name)
        for task in self._compute.pool.take(names):
            fellow = task.subject
            assert isinstance(fellow, Entry)  # groups are not batched
            self._open += fellow._open
            for part in {part.work: part for part in fellow._open}.values():
                self._compute.started(part)

    def _next_pass(self) -> list[Part]:
        """Returns the next parts, in order, that fit into one pass."""
        room, now = self._compute.max_chunk_tokens, [self._open[0]]
        room -= now[0].tokens
        for part in self._open[1:]:
            if part.tokens > room:
                break
            now.append(part)
            room -= part.tokens
        for part in now:
            part.work.job.begin_part()
        return now

    def _run_pass(self) -> Generator[StopPoint | Completion]:
        compute, parts = self._compute, self._now
        tasks = [
            PrefillTask(
                token_ids=part.work.prompt_ids[part.start : part.start + part.tokens].to(
                    compute.engine.device
                ),
                history_tokens=part.start,
                pages=part.work.job.pages,
                want_logits=part.work.is_last(part),
                want_prompt_logprobs=part.work.job.sampling.prompt_logprobs >= 0,
                name=parts[0].work.job.request_id,
                on_layer=partial(self._publish, part),
            )
            for part in parts
        ]
        boundaries = compute.engine.runner.prefill_batch(tasks)
        with compute.one_pass(self.task, boundaries, sum(part.tokens for part in parts)):
            for boundary in boundaries:
                self._look_after(parts)
                if boundary.operator == "attn":
                    for part in parts:
                        self._publish(part, boundary.layer)
                awaited = boundary.awaited
                self._leave_by = PrefillEvent.HAND_ON if awaited else PrefillEvent.PREEMPT
                yield awaited or StopPoint.after(boundary.operator)
        for part, task in zip(parts, tasks, strict=True):
            part.work.job.end_part(part.name, tokens=part.tokens, history=part.start)
            if part.error is None:
                if task.hidden is not None:
                    compute.add_prompt_logprobs(part.work, part.start, task.hidden)
                if task.logits is not None:
                    compute.sample(part, task.logits)

    def _publish(self, part: Part, layer: int) -> None:
        self._compute.publish(part, layer, part.start, part.tokens)

    def _look_after(self, parts: list[Part]) -> None:
        """Notes the parts whose result is unwanted. Raises the error when all parts are."""
        for part in parts:
            part.error = part.error or part.work.failure()
        if parts[0].error is not None and all(part.error is not None for part in parts):
            raise parts[0].error

    def _close(self, part: Part) -> None:
        """Ends the part after its pass, and its chunk and job if it was their last."""
        work = part.work
        if part.error is not None:
            self._open = [other for other in self._open if other.work is not work]
            work.done(part.error)
        elif all(other.work is not work for other in self._open):
            self._compute.finished(part, self.task.spent_s())
            if work.is_last(part):
                work.done(None)
            else:  # now, so that it is in the pool before the pool chooses a task
                self._follow(work, part.chunk + 1)

    # -- the pool's callbacks

    def _resumed(self) -> None:
        for part in self._heads():
            self._compute.started(part)
        for part in self._now:
            part.work.job.begin_part()

    def _suspended(self) -> None:
        if self._leave_by is PrefillEvent.PREEMPT:
            self._compute.metrics.preempted.inc()
        for part in self._now:
            part.work.job.end_part(part.name, tokens=part.tokens, history=part.start)
        for part in self._heads():
            self._compute.suspended(part, self.task.compute_s, self._leave_by)

    def _ended(self, error: Exception | None) -> None:
        in_flight = self._compute.engine.runner.in_flight
        for part in self._heads():  # none, unless the task ended early
            if in_flight is not None:
                in_flight.drop([part.work.job.request_id])
            part.work.done(part.error or part.work.failure() or error)

    def _is_unwanted(self) -> bool:
        return all(part.error or part.work.failure() for part in self._open)

    def _heads(self) -> list[Part]:
        """Lists the next part of each unfinished job."""
        return list({part.work: part for part in reversed(self._open)}.values())[::-1]
