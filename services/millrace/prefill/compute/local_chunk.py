"""Computes chunks that need no other instance, pass by pass (FlowPrefill, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from millrace.core.instance.stop_point import StopPoint
from millrace.core.kv.sp_layout import GroupPass
from millrace.engine.completion import Completion
from millrace.engine.execution_pool import ChunkTask
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.prefill.compute.context import PrefillCompute
from millrace.prefill.compute.first_tokens import SamplingError
from millrace.prefill.job import PrefillJob, task_name
from millrace.prefill.states import PrefillEvent


class LocalChunk(ChunkTask):
    """A `ChunkTask`: one job's chunk, and the chunks that are computed with it.

    Of the tasks that the scheduler batched with this task, those that are ready when this task
    begins join it; the others run alone. An unwanted job leaves at the end of the pass, which still
    writes its pages; if all jobs of the pass are unwanted, the pass ends at once.
    """

    def __init__(self, compute: PrefillCompute, job: PrefillJob, chunk: int) -> None:
        super().__init__(task_name(job.request_id, chunk), self._run())
        self._compute = compute
        self._job = job
        self._chunk = chunk
        self._left = list(job.passes[chunk])  # to be computed
        self._error: Exception | None = None  # why its result is dropped
        self._open = [self]  # chunks with passes left, in their order
        self._now: list[LocalChunk] = []  # in the current pass
        self._leave_by = PrefillEvent.PREEMPT  # how the pass leaves this stage at its boundary

    def _run(self) -> Generator[StopPoint | Completion]:
        self._join()
        while self._open:
            self._now = self._next_pass()
            yield from self._run_pass()
            now, self._now = self._now, []
            for chunk in now:
                del chunk._left[0]
                self._close(chunk)
            if self._open:
                yield StopPoint.PASS

    def _join(self) -> None:
        for fellow in self._compute.pool.take(self._compute.batched_with(self.name)):
            assert isinstance(fellow, LocalChunk)  # groups are not batched
            self._open.append(fellow)
            self._compute.started(fellow._job, fellow._chunk)

    def _next_pass(self) -> list[LocalChunk]:
        """Returns the next chunks, in order, whose next passes fit into one pass."""
        room = self._compute.max_chunk_tokens
        now: list[LocalChunk] = []
        for chunk in self._open:
            room -= chunk._left[0].num_tokens
            if now and room < 0:
                break
            now.append(chunk)
            chunk._job.begin_pass()
            if len(chunk._left) > 1:
                break  # two passes of one chunk never fit into one
        return now

    def _run_pass(self) -> Generator[StopPoint | Completion]:
        compute, chunks = self._compute, self._now
        tasks = [chunk._task(chunk._left[0]) for chunk in chunks]
        boundaries = compute.engine.runner.prefill_batch(tasks)
        tokens = sum(chunk._left[0].num_tokens for chunk in chunks)
        with compute.one_pass(self, boundaries, tokens):
            for boundary in boundaries:
                self._look_after(chunks)
                if boundary.operator == "attn":
                    for chunk in chunks:
                        chunk._publish(chunk._left[0], boundary.layer)
                awaited = boundary.awaited
                self._leave_by = PrefillEvent.HAND_ON if awaited else PrefillEvent.PREEMPT
                self.pace.operator = boundary.operator
                yield awaited or StopPoint.after(boundary.operator)
        for chunk, task in zip(chunks, tasks, strict=True):
            chunk._take_results(task)

    def _task(self, one: GroupPass) -> PrefillTask:
        job, start = self._job, one.start_token
        return PrefillTask(
            token_ids=job.prompt_ids[start : start + one.num_tokens].to(
                self._compute.engine.device
            ),
            history_tokens=start,
            pages=job.pages,
            want_logits=job.wants_logits(one),
            want_hidden=job.wants_hidden(one),
            name=job.request_id,
            on_layer=partial(self._written, one),
            awaits_kv=len(self._left) == 1 and job.gives_after(self._chunk),
        )

    def _take_results(self, task: PrefillTask) -> None:
        job, one = self._job, self._left[0]
        job.end_pass(one)
        if self._error is not None:
            return
        self._compute.advanced(job, one)
        if task.hidden is not None:
            self._compute.add_prompt_logprobs(job, one.start_token, task.hidden)
            job.add_hidden(one, task.hidden)
        if task.logits is not None:
            try:
                self._compute.sample(job, task.logits)
            except SamplingError as error:  # fails this prompt only, not its batch
                self._error = error

    def _publish(self, one: GroupPass, layer: int) -> None:
        if self._error is None:
            self._compute.publish(self._job, one, layer, one.start_token, one.num_tokens)

    def _written(self, one: GroupPass, layer: int) -> None:
        """Takes the report of a later stage. Called on any thread."""
        if self._error is None:
            self._compute.written(self._job, one, layer)

    def _look_after(self, chunks: list[LocalChunk]) -> None:
        """Notes the chunks whose result is unwanted. Raises the error when all chunks are."""
        for chunk in chunks:
            chunk._error = chunk._error or chunk._job.unwanted()
        if chunks[0]._error is not None and all(chunk._error is not None for chunk in chunks):
            raise chunks[0]._error

    def _close(self, chunk: LocalChunk) -> None:
        """Ends the chunk after its last pass, or after any pass if its result is unwanted."""
        if chunk._error is not None:
            chunk._job.done(chunk._error)
        elif not chunk._left:
            self._compute.finished(chunk._job, chunk._chunk, self.spent_s())
        else:
            return
        self._open.remove(chunk)

    # -- the pool's calls

    def resumed(self) -> None:
        for chunk in self._open:
            self._compute.started(chunk._job, chunk._chunk)
        for chunk in self._now:
            chunk._job.begin_pass()

    def suspended(self) -> None:
        if self._leave_by is PrefillEvent.PREEMPT:
            self._compute.metrics.preempted.inc()
        for chunk in self._now:
            chunk._job.end_pass(chunk._left[0])
        for chunk in self._open:
            self._compute.suspended(chunk._job, chunk._chunk, self.compute_s, self._leave_by)

    def ended(self, error: Exception | None) -> None:
        in_flight = self._compute.engine.runner.in_flight
        for chunk in self._open:  # none, unless the task ended early
            if in_flight is not None:
                in_flight.drop([chunk._job.request_id])
            chunk._job.done(chunk._error or chunk._job.unwanted() or error)

    def is_unwanted(self) -> bool:
        return all(chunk._error or chunk._job.unwanted() for chunk in self._open)
