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
    """A `ChunkTask`: one job's chunk, and the prompts that join its last pass.

    Of the tasks that the scheduler batched with this task, those that are ready when the last pass
    begins, and fit into it, join it and end with it; the others run alone, under their own names.
    An unwanted job leaves at the end of the pass, which still writes its pages; if all jobs of the
    pass are unwanted, the pass ends at once.
    """

    def __init__(self, compute: PrefillCompute, job: PrefillJob, chunk: int) -> None:
        super().__init__(task_name(job.request_id, chunk), self._run())
        self._compute = compute
        self._job = job
        self._chunk = chunk
        self._left = list(job.passes[chunk])  # to be computed
        if len(self._left) == 1:
            self.joins_tokens = self._left[0].num_tokens
        self._error: Exception | None = None  # why its result is dropped
        self._open = [self]  # chunks whose result has not been reported, in their order
        self._is_in_pass = False
        self._leave_by = PrefillEvent.PREEMPT  # how the pass leaves this stage at its boundary

    def _run(self) -> Generator[StopPoint | Completion]:
        while self._left:
            if len(self._left) == 1:
                self._join()
            self._begin_pass()
            yield from self._run_pass()
            self._is_in_pass = False
            for chunk in self._open:
                del chunk._left[0]
            if self._left:
                yield StopPoint.PASS
        for chunk in list(self._open):
            self._report_end(chunk)
            self._open.remove(chunk)

    def _join(self) -> None:
        compute = self._compute
        room = compute.max_chunk_tokens - self._left[0].num_tokens
        for fellow in compute.pool.take(compute.batched_with(self.name), room):
            assert isinstance(fellow, LocalChunk)  # no other task joins a pass
            self._open.append(fellow)
            compute.started(fellow._job, fellow._chunk)

    def _begin_pass(self) -> None:
        self._is_in_pass = True
        for chunk in self._open:
            chunk._job.begin_pass()

    def _run_pass(self) -> Generator[StopPoint | Completion]:
        compute, chunks = self._compute, self._open
        tasks = [chunk._task(chunk._left[0]) for chunk in chunks]
        boundaries = compute.engine.runner.prefill_batch(tasks)
        tokens = sum(chunk._left[0].num_tokens for chunk in chunks)
        with compute.one_pass(self, boundaries, tokens):
            for boundary in boundaries:
                self._look_after()
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

    def _look_after(self) -> None:
        """Notes the chunks whose result is unwanted. Raises the error when all chunks are."""
        for chunk in self._open:
            chunk._error = chunk._error or chunk._job.unwanted()
        if self._error is not None and self.is_unwanted():
            raise self._error

    def _report_end(self, chunk: LocalChunk) -> None:
        if chunk._error is None:
            self._compute.finished(chunk._job, chunk._chunk, self.spent_s())
        else:
            chunk._job.done(chunk._error)

    # -- the pool's calls

    def resumed(self) -> None:
        for chunk in self._open:
            self._compute.started(chunk._job, chunk._chunk)
        if self._is_in_pass:
            self._begin_pass()

    def suspended(self) -> None:
        if self._leave_by is PrefillEvent.PREEMPT:
            self._compute.metrics.preempted.inc()
        for chunk in self._open:
            if self._is_in_pass:
                chunk._job.end_pass(chunk._left[0])
            self._compute.suspended(chunk._job, chunk._chunk, self.compute_s, self._leave_by)

    def ended(self, error: Exception | None) -> None:
        in_flight = self._compute.engine.runner.in_flight
        for chunk in self._open:  # none, unless the task ended early
            if in_flight is not None:
                in_flight.drop([chunk._job.request_id])
            chunk._job.done(chunk._error or chunk._job.unwanted() or error)

    def is_unwanted(self) -> bool:
        return all(chunk._error or chunk._job.unwanted() for chunk in self._open)
