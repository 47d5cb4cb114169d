"""What the compute thread does for a prefill instance: entries of its queue, pass by pass.

An entry is a chunk of one prompt, or whole prompts computed together (FlowPrefill, Algorithm 1).
Each runs as a task of the execution pool: a generator that yields at operator boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from millrace.engine.assembly import Engine
from millrace.engine.execution_pool import ExecutionPool, PoolTask, StopPoint
from millrace.engine.logprobs import PositionLogprobs, position_logprobs
from millrace.engine.model_runner import PrefillTask
from millrace.engine.sampler import Sampler
from millrace.engine.sampling_spec import SamplingRow
from millrace.prefill.job import Cancelled, PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.publish import LayerPublisher
from millrace.wire.pb import scheduler_pb2
from millrace.worker.codec import passes

LOGPROB_BLOCK_TOKENS = 256


@dataclass(slots=True)
class PrefillOutcome:
    """Token one of each choice with its log-probabilities, and the prompt's where asked for."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    passes: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """The share of one job in one forward pass."""

    work: Work
    number: int  # of the job's passes
    chunk: int
    start: int
    tokens: int
    error: Exception | None = None  # nobody wants its result any more

    @property
    def name(self) -> str:
        return f"chunk {self.number}"


class Work:
    """A prepared job's computation: its parts, and what has come of them so far."""

    def __init__(
        self,
        job: PrefillJob,
        prompt_ids: torch.Tensor,
        max_chunk_tokens: int,
        done: Callable[[Exception | None], None],
    ) -> None:
        """prompt_ids: int64 [prompt_tokens] on the CPU. `done` is told the end, why if early."""
        self.job = job
        self.prompt_ids = prompt_ids
        self.done = done
        chunks = [(c.start_token, c.num_tokens) for c in job.command.chunks]
        self.parts = [
            Part(self, number, chunk, start, tokens)
            for number, (chunk, start, tokens) in enumerate(passes(chunks, max_chunk_tokens))
        ]
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.outcome: PrefillOutcome | None = None

    def of_chunk(self, chunk: int) -> list[Part]:
        return [part for part in self.parts if part.chunk == chunk]

    def is_last(self, part: Part) -> bool:
        return part is self.parts[-1]

    def failure(self) -> Exception | None:
        """Why its result has nowhere to go, if so."""
        if self.job.cancelled:
            return Cancelled()
        return None if self.job.session is None else self.job.session.failure


class PrefillCompute:
    """The compute thread's half of a prefill instance."""

    def __init__(
        self,
        engine: Engine,
        max_chunk_tokens: int,
        report: Callable[[scheduler_pb2.WorkerMessage], object],
        metrics: PrefillMetrics,
        pool: ExecutionPool,
    ) -> None:
        self.engine = engine
        self.max_chunk_tokens = max_chunk_tokens
        self.report = report
        self.metrics = metrics
        self.pool = pool
        self._sampler = Sampler()
        self.publisher = LayerPublisher(engine.device)

    def close(self) -> None:
        self.publisher.close()

    def add_prompt_logprobs(self, part: Part, hidden: torch.Tensor) -> None:
        """Log probabilities of the prompt's own tokens, in blocks of bounded memory.

        hidden: [L, hidden_size] of the part's positions; each says the likeliness of the next id.
        """
        work = part.work
        top = work.job.sampling.prompt_logprobs
        for first in range(0, len(hidden), LOGPROB_BLOCK_TOKENS):
            rows = hidden[first : first + LOGPROB_BLOCK_TOKENS]
            start = part.start + first + 1
            targets = work.prompt_ids[start : start + len(rows)].tolist()
            logits = self.engine.runner.project(rows[: len(targets)])
            work.prompt_logprobs += position_logprobs(logits, targets, [top] * len(targets))

    def sample(self, work: Work, logits: torch.Tensor) -> PrefillOutcome:
        """Token one of every choice, from float32 [vocab]. Raises RuntimeError for bad logits."""
        spec = work.job.sampling
        seen = work.prompt_ids.numpy() if spec.needs_prompt_ids else None
        rows = [SamplingRow.first(spec, choice, seen) for choice in range(spec.n)]
        sampled = self._sampler.sample(logits.expand(spec.n, -1), rows)
        if sampled.errors:
            raise RuntimeError(next(iter(sampled.errors.values())))
        return PrefillOutcome(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=work.prompt_logprobs,
            passes=len(work.parts),
        )


class Entry:
    """An entry of the instance's queue at work: one job's chunk, and what is computed with it.

    `fellows` names the tasks of the jobs that the scheduler batched with this one. Those that are
    ready when it begins join it; the others go on their own. A job whose result nobody wants any
    more leaves at the end of the pass, which writes its pages; one that is alone leaves at once.
    """

    def __init__(
        self,
        compute: PrefillCompute,
        work: Work,
        chunk: int,
        fellows: Callable[[str], Sequence[str]],
    ) -> None:
        self._compute = compute
        self._fellows = fellows
        self._open = work.of_chunk(chunk)  # parts still to be computed, in their order
        self._now: list[Part] = []  # in the pass at hand
        self.task = PoolTask(
            name=task_name(work.job.request_id, chunk),
            steps=self._steps(),
            resumed=self._resumed,
            suspended=self._suspended,
            ended=self._ended,
            is_unwanted=self._is_unwanted,
            subject=self,
        )

    # -- the generator: on the pool's thread, as all of this

    def _steps(self) -> Generator[StopPoint]:
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
            assert isinstance(fellow, Entry)  # the pool has nothing else
            self._open += fellow._open
            for part in {part.work: part for part in fellow._open}.values():
                self._started(part)

    def _next_pass(self) -> list[Part]:
        """The parts that fit into a pass, of one job at a time unless whole chunks fit."""
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

    def _run_pass(self) -> Generator[StopPoint]:
        engine, publisher = self._compute.engine, self._compute.publisher
        parts = self._now
        tasks = [
            PrefillTask(
                token_ids=part.work.prompt_ids[part.start : part.start + part.tokens].to(
                    engine.device
                ),
                history_tokens=part.start,
                pages=part.work.job.pages,
                want_logits=part.work.is_last(part),
                want_prompt_logprobs=part.work.job.sampling.prompt_logprobs >= 0,
            )
            for part in parts
        ]
        spent_s = self.task.spent_s()
        boundaries = engine.runner.prefill_batch(tasks)
        try:
            for boundary in boundaries:
                self._look_after(parts)
                if boundary.operator == "attn":
                    for part in parts:
                        self._publish(part, boundary.layer)
                yield StopPoint.after(boundary.operator)
        finally:
            boundaries.close()  # here and now: what it frees belongs to this thread
            publisher.flush()  # the pages must not be freed under the device's hands
        self._compute.metrics.compute_s.observe(self.task.spent_s() - spent_s)
        self._compute.metrics.tokens.inc(sum(part.tokens for part in parts))
        for part, task in zip(parts, tasks, strict=True):
            part.work.job.end_part(part.name, tokens=part.tokens, history=part.start)
            if part.error is None:
                if task.hidden is not None:
                    self._compute.add_prompt_logprobs(part, task.hidden)
                if task.logits is not None:
                    self._sample(part, task.logits)

    def _sample(self, part: Part, logits: torch.Tensor) -> None:
        try:
            part.work.outcome = self._compute.sample(part.work, logits)
        except RuntimeError as error:  # of this prompt: the others of its batch go on
            part.error = error

    def _look_after(self, parts: list[Part]) -> None:
        """Notes whose result has nowhere to go. Raises the reason when that is all of them."""
        for part in parts:
            part.error = part.error or part.work.failure()
        if parts[0].error is not None and all(part.error is not None for part in parts):
            raise parts[0].error

    def _publish(self, part: Part, layer: int) -> None:
        session = part.work.job.session
        if session is not None and part.error is None:
            self._compute.publisher.after_device(
                partial(session.layer_ready, part.number, layer, part.start, part.tokens)
            )

    def _close(self, part: Part) -> None:
        """After its pass: tells what has come to its end with the part."""
        work = part.work
        if part.error is not None:
            self._open = [other for other in self._open if other.work is not work]
            work.done(part.error)
        elif all(other.work is not work for other in self._open):
            self._compute.metrics.chunks.inc()
            finished = scheduler_pb2.ChunkFinished(
                request_id=work.job.request_id,
                chunk_index=part.chunk,
                compute_s=self.task.spent_s(),
                last=work.is_last(part),
            )
            self._compute.report(scheduler_pb2.WorkerMessage(chunk_finished=finished))
            if work.is_last(part):
                work.done(None)
            else:  # from here, so that it is in the pool before another can take its turn
                following = Entry(self._compute, work, part.chunk + 1, self._fellows)
                self._compute.pool.submit(following.task)

    # -- what the pool tells

    def _resumed(self) -> None:
        for part in self._heads():
            self._started(part)
        for part in self._now:
            part.work.job.begin_part()

    def _suspended(self) -> None:
        self._compute.metrics.preempted.inc()
        for part in self._now:
            part.work.job.end_part(part.name, tokens=part.tokens, history=part.start)
        for part in self._heads():
            part.work.job.suspend()
            suspended = scheduler_pb2.ChunkSuspended(
                request_id=part.work.job.request_id,
                chunk_index=part.chunk,
                compute_s=self.task.compute_s,
            )
            self._compute.report(scheduler_pb2.WorkerMessage(chunk_suspended=suspended))

    def _ended(self, error: Exception | None) -> None:
        for part in self._heads():  # none, unless it was cut short
            part.work.done(part.error or part.work.failure() or error)

    def _is_unwanted(self) -> bool:
        return all(part.error or part.work.failure() for part in self._open)

    def _heads(self) -> list[Part]:
        """The next part of each job that is not done."""
        return list({part.work: part for part in reversed(self._open)}.values())[::-1]

    def _started(self, part: Part) -> None:
        job = part.work.job
        job.go_on(self._compute.metrics)
        started = scheduler_pb2.ChunkStarted(request_id=job.request_id, chunk_index=part.chunk)
        self._compute.report(scheduler_pb2.WorkerMessage(chunk_started=started))


def task_name(request_id: str, chunk: int) -> str:
    """Of the pool's task that computes a chunk of a request."""
    return f"{request_id}/{chunk}"
