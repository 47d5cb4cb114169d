"""Runs an SP group's chunk at one member, as a task of the member's execution pool.

Ring attention over zigzag shares (Tetris section 4.1): every member runs the same passes over its
own tokens, and the members' K/V goes round the ring while each attends to the K/V at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch

from millrace.core.instance.gang import GangKey, GangSpec
from millrace.core.kv.sp_layout import ChunkShares, Pass, ring_buffers
from millrace.engine.attention.ring import RingTask, ring_task
from millrace.engine.execution_pool import PoolTask, StopPoint
from millrace.engine.model.operators import operator_names
from millrace.prefill.compute.entry import PrefillCompute
from millrace.prefill.compute.work import Part, Work, task_name
from millrace.transfer.ring.chunk_link import ChunkLink, Waits
from millrace.transfer.ring.manager import GroupLink


class AloneLink:
    """The `RingLink` of a single member, which waits for history that decode sends."""

    rank, size = 0, 1

    def __init__(self, group: GroupLink) -> None:
        self._group = group
        self.waits = Waits()

    def begin_pass(self, index: int) -> None:
        """Does nothing: no block goes round."""

    def history(self, layer: int) -> bool:
        started_s = time.monotonic()
        came = self._group.history(layer)
        self.waits.history_s += time.monotonic() - started_s
        return came

    def publish(self, layer: int) -> None:
        """Does nothing: no other member waits for the layer."""

    def wait(self, step: int) -> bool:
        raise ValueError(f"step {step} of a ring of one")

    def release(self, step: int) -> None:
        raise ValueError(f"step {step} of a ring of one")

    def end(self) -> None:
        """Does nothing: no block went round."""


class GangEntry:
    """An SP group's chunk at this member.

    `follow` gets the work and the number of its next chunk after this chunk.
    """

    def __init__(
        self,
        compute: PrefillCompute,
        work: Work,
        chunk: int,
        shares: ChunkShares,
        follow: Callable[[Work, int], None],
    ) -> None:
        job = work.job
        assert job.link is not None  # all members have joined before compute begins
        self._compute = compute
        self._work = work
        self._shares = shares
        self._follow = follow
        self._rank = shares.group.index(job.instance_id)
        self._wants_logprobs = job.sampling.prompt_logprobs >= 0
        self._open = work.of_chunk(chunk)
        self._link: ChunkLink | AloneLink
        if len(shares.group) == 1:
            self._link = AloneLink(job.link)
        else:
            self._link = job.link.chunk(shares, compute.publisher.after_device)
        stops, last_stop = self._stops()
        self.task = PoolTask(
            name=task_name(job.request_id, chunk),
            steps=self._steps(),
            resumed=self._resumed,
            suspended=self._suspended,
            ended=self._ended,
            is_unwanted=lambda: self._work.failure() is not None,
            subject=self,
            gang=GangSpec(
                key=GangKey(job.request_id, job.attempt, chunk),
                members=shares.group,
                me=job.instance_id,
                stops=stops,
                last_stop=last_stop,
            ),
        )

    # -- the generator: this class runs on the pool's thread

    def _steps(self) -> Generator[StopPoint]:
        for index, one in enumerate(self._shares.passes):
            part = self._open[0]
            part.work.job.begin_part()
            self._link.begin_pass(index)
            yield from self._run_pass(index, one, part)
            del self._open[0]
            if self._open:
                yield StopPoint.PASS
        self._close(part)

    def _run_pass(self, index: int, one: Pass, part: Part) -> Generator[StopPoint]:
        compute, runs = self._compute, one.runs[self._rank]
        task = self._task(index, part)
        boundaries = compute.engine.runner.prefill_ring(task)
        with compute.one_pass(self.task, boundaries, sum(run.num_tokens for run in runs)):
            for boundary in boundaries:
                if (failure := self._work.failure()) is not None:
                    raise failure
                if boundary.operator == "attn":
                    for run in runs:
                        compute.publish(part, boundary.layer, run.start_token, run.num_tokens)
                yield StopPoint.after(boundary.operator)
        self._end_part(part)
        if task.hidden is not None:
            rows = torch.split(task.hidden, [run.num_tokens for run in runs])
            for run, hidden in zip(runs, rows, strict=True):
                compute.add_prompt_logprobs(self._work, run.start_token, hidden)
        if task.logits is not None:
            compute.sample(part, task.logits)

    def _task(self, index: int, part: Part) -> RingTask:
        job = self._work.job
        is_last = self._work.is_last(part)
        task = ring_task(
            self._shares,
            index,
            self._link,
            prompt_ids=self._work.prompt_ids,
            pages=job.pages,
            buffers=ring_buffers(job.buffers),
            layout=self._compute.engine.pool.layout,
            last_layer=is_last or self._wants_logprobs,
        )
        task.name = job.request_id
        task.want_logits = is_last and job.leads
        task.want_prompt_logprobs = self._wants_logprobs
        return task

    def _close(self, part: Part) -> None:
        """Ends the chunk after its last pass."""
        work = self._work
        if part.error is not None:
            raise part.error
        self._link.end()
        self._compute.metrics.waited(self._link.waits)
        self._compute.finished(part, self.task.spent_s(), self._link.waits)
        if work.is_last(part):
            work.done(None)
        else:  # now, so that it is in the pool before the pool chooses its next task
            self._follow(work, part.chunk + 1)

    # -- the pool's callbacks

    def _resumed(self) -> None:
        if self._open:
            self._compute.started(self._open[0])
            self._work.job.begin_part()

    def _suspended(self) -> None:
        processes = self._compute.engine.runner.processes
        if processes is not None:
            processes.rest()
        self._compute.metrics.preempted.inc()
        if self._open:
            self._end_part(self._open[0])
            self._compute.suspended(self._open[0], self.task.compute_s)

    def _ended(self, error: Exception | None) -> None:
        if error is not None:
            self._work.done(self._work.failure() or error)

    def _end_part(self, part: Part) -> None:
        waited = self._link.waits
        part.work.job.end_part(
            part.name,
            tokens=part.tokens,
            history=part.start,
            group=len(self._shares.group),
            ring_wait_s=f"{waited.blocks_s:.6f}",
            history_wait_s=f"{waited.history_s:.6f}",
        )

    def _stops(self) -> tuple[bytes, int]:
        """Returns `stops` and `last_stop` of `GangSpec`: the points that `_steps` yields at the
        leader, and the last point that every member reaches. This is the last layer's attention:
        after it, members that are not the leader may be done.
        """
        names = operator_names(self._compute.engine.shape)
        operators = [StopPoint.after(name) for name in names]
        attn = len(names) - 1 - names[::-1].index("attn")
        stops, last_stop = [StopPoint.PASS], 0
        for part in self._open:
            is_last = self._work.is_last(part)
            last_stop = len(stops) - 1 + attn
            goes_on = is_last or self._wants_logprobs
            stops += operators if goes_on else operators[: attn + 1]
            if part is not self._open[-1]:
                stops.append(StopPoint.PASS)
        return bytes(stops), last_stop
