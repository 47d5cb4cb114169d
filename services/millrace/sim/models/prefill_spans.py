"""Records when prefill tasks compute: for the jobs, for the sums of a run, and for its timeline."""

from __future__ import annotations

from millrace.sim.cluster.job import Job, Task
from millrace.sim.cluster.world import World


class PrefillSpans:
    """The spans of computing of all tasks. A task computes from `started` to `ended`."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self._tally = world.tally
        self._timeline = world.timeline

    def started(self, task: Task) -> None:
        """Notes that the task computes from now on, at all its members."""
        now_s = self._clock.now_s
        task.started_s = now_s
        task.span += 1
        for member in task.members:
            if member.waits_since_s is not None:
                if self._timeline is not None:
                    index = task.parts[0][0].job.plan.index
                    self._timeline.block(member.id, member.waits_since_s, now_s, index, "idle wait")
                member.waits_since_s = None
        for attempt, _ in task.parts:
            _continued(attempt.job, now_s)

    def ended(self, task: Task) -> None:
        """Notes that the running task has stopped, or is over."""
        now_s, started_s = self._clock.now_s, task.started_s
        assert started_s is not None
        spent_s = now_s - started_s
        task.compute_s += spent_s
        task.started_s = None
        signal_s = task.signal_s
        if signal_s is not None:
            self._tally.blocking.add(now_s - signal_s)
            task.signal_s = None
        self._tally.busy("prefill", spent_s * len(task.members))
        for attempt, _ in task.parts:
            attempt.job.idle_since_s = now_s
        if self._timeline is None:
            return
        index = task.parts[0][0].job.plan.index
        until_s = now_s if signal_s is None else signal_s
        for member in task.members:
            self._timeline.block(member.id, started_s, until_s, index, "prefill")
            self._timeline.block(member.id, until_s, now_s, index, "blocked")


def _continued(job: Job, now_s: float) -> None:
    if job.idle_since_s is not None:
        gap_s = now_s - job.idle_since_s
        job.suspended_s += gap_s
        if gap_s > job.longest_suspension_s:
            job.longest_suspension_s = gap_s
        job.idle_since_s = None
    elif job.first_start_s is None:
        job.first_start_s = now_s
