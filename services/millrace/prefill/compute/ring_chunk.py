"""Computes an SP group's chunk at one member, pass by pass.

Ring attention over zigzag shares (Tetris section 4.1): every member runs the same passes over its
own tokens, and the members' K/V goes round the ring while each attends to the K/V at hand.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from millrace.core.instance.gang import GangKey, GangSpec
from millrace.core.instance.group import GroupError
from millrace.core.instance.stop_point import StopPoint
from millrace.core.kv.sp_layout import ChunkShares, GroupPass, ring_buffers
from millrace.engine.attention.ring import RingTask, ring_task
from millrace.engine.execution_pool import ChunkTask
from millrace.engine.model.operators import operator_names
from millrace.prefill.compute.context import PrefillCompute
from millrace.prefill.job import PrefillJob, task_name
from millrace.transfer.ring.chunk_link import ChunkLink, Waits
from millrace.transfer.ring.manager import GroupLink


class AloneLink:
    """The `RingLink` of a single member, which waits for history that decode sends."""

    rank, size = 0, 1

    def __init__(self, group: GroupLink) -> None:
        self._group = group
        self.waits = Waits()
        self.is_broken = False

    def begin_pass(self, index: int) -> None:
        """Does nothing: no block goes round."""

    def history(self, layer: int) -> bool:
        started_s = time.monotonic()
        came = self._group.history(layer)
        self.waits.history_s += time.monotonic() - started_s
        self.is_broken |= not came
        return came

    def publish(self, layer: int) -> None:
        """Does nothing: no other member waits for the layer."""

    def wait(self, step: int) -> bool:
        raise ValueError(f"step {step} of a ring of one")

    def release(self, step: int) -> None:
        raise ValueError(f"step {step} of a ring of one")

    def end(self) -> None:
        """Does nothing: no block went round."""


class RingChunk(ChunkTask):
    """A `ChunkTask`: an SP group's chunk at this member."""

    def __init__(
        self, compute: PrefillCompute, job: PrefillJob, chunk: int, shares: ChunkShares
    ) -> None:
        assert job.link is not None  # all members have joined before compute begins
        self._compute = compute
        self._job = job
        self._chunk = chunk
        self._shares = shares
        self._rank = shares.group.index(job.instance_id)
        self._pass: GroupPass | None = None  # the current pass
        self._link: ChunkLink | AloneLink
        if len(shares.group) == 1:
            self._link = AloneLink(job.link)
        else:
            self._link = job.link.chunk(shares, compute.publisher.after_device)
        stops, last_stop = self._stops()
        gang = GangSpec(
            key=GangKey(job.request_id, job.attempt, chunk),
            members=shares.group,
            me=job.instance_id,
            stops=stops,
            last_stop=last_stop,
        )
        super().__init__(task_name(job.request_id, chunk), self._run(), gang)

    def _run(self) -> Generator[StopPoint]:
        passes = self._shares.passes
        for index, one in enumerate(passes):
            self._pass = one
            self._job.begin_pass()
            self._link.begin_pass(index)
            yield from self._run_pass(index, one)
            self._pass = None
            if one is not passes[-1]:
                yield StopPoint.PASS
        self._link.end()
        self._compute.metrics.waited(self._link.waits)
        self._compute.finished(self._job, self._chunk, self.spent_s(), self._link.waits)

    def _run_pass(self, index: int, one: GroupPass) -> Generator[StopPoint]:
        compute, job, runs = self._compute, self._job, one.runs[self._rank]
        task = self._task(index, one)
        boundaries = compute.engine.runner.prefill_ring(task)
        with compute.one_pass(self, boundaries, sum(run.num_tokens for run in runs)):
            for boundary in boundaries:
                if (reason := self._unwanted()) is not None:
                    raise reason
                if boundary.operator == "attn":
                    for run in runs:
                        compute.publish(job, one, boundary.layer, run.start_token, run.num_tokens)
                self.pace.operator = boundary.operator
                yield StopPoint.after(boundary.operator)
        self._end_pass(one)
        compute.advanced(job, one)
        if task.hidden is not None:
            rows = torch.split(task.hidden, [run.num_tokens for run in runs])
            for run, hidden in zip(runs, rows, strict=True):
                compute.add_prompt_logprobs(job, run.start_token, hidden)
            job.add_hidden(one, task.hidden)
        if task.logits is not None:
            compute.sample(job, task.logits)

    def _unwanted(self) -> Exception | None:
        """Returns why the pass is to be dropped: as of the job, or because it lacks blocks. The job
        hears of that from its event loop, when compute may have gone on for a while."""
        if (reason := self._job.unwanted()) is None and self._link.is_broken:
            assert self._job.link is not None  # it has ended with this reason
            reason = GroupError(f"request {self._job.request_id}: {self._job.link.broken_by}")
        return reason

    def _task(self, index: int, one: GroupPass) -> RingTask:
        job = self._job
        task = ring_task(
            self._shares,
            index,
            self._link,
            prompt_ids=job.prompt_ids,
            pages=job.pages,
            buffers=ring_buffers(job.buffers),
            layout=self._compute.engine.layout,
            last_layer=job.is_last(one) or job.needs_whole_prompt,
        )
        task.name = job.request_id
        task.want_logits = job.wants_logits(one)
        task.want_hidden = job.wants_hidden(one)
        return task

    def _end_pass(self, one: GroupPass) -> None:
        waited = self._link.waits
        self._job.end_pass(
            one,
            group=len(self._shares.group),
            ring_wait_s=f"{waited.blocks_s:.6f}",
            history_wait_s=f"{waited.history_s:.6f}",
        )

    # -- the pool's calls

    def resumed(self) -> None:
        self._compute.started(self._job, self._chunk)
        self._job.begin_pass()

    def suspended(self) -> None:
        processes = self._compute.engine.runner.processes
        if processes is not None:
            processes.rest()
        self._compute.metrics.preempted.inc()
        if self._pass is not None:
            self._end_pass(self._pass)
        self._compute.suspended(self._job, self._chunk, self.compute_s)

    def ended(self, error: Exception | None) -> None:
        if error is not None:
            self._job.done(self._unwanted() or error)

    def is_unwanted(self) -> bool:
        return self._job.unwanted() is not None

    def _stops(self) -> tuple[bytes, int]:
        """Returns `stops` and `last_stop` of `GangSpec`: the points that `_run` yields at the
        leader, and the last point that every member reaches. This is the last layer's attention:
        after it, members that are not the leader may be done.
        """
        names = operator_names(self._compute.engine.shape)
        operators = [StopPoint.after(name) for name in names]
        attn = len(names) - 1 - names[::-1].index("attn")
        stops, last_stop = [StopPoint.PASS], 0
        for one in self._shares.passes:
            last_stop = len(stops) - 1 + attn
            goes_on = self._job.is_last(one) or self._job.needs_whole_prompt
            stops += operators if goes_on else operators[: attn + 1]
            if one is not self._shares.passes[-1]:
                stops.append(StopPoint.PASS)
        return bytes(stops), last_stop
