"""Watches for a pool in which work is prepared and nothing begins.

The protocol of gangs stops in no order of messages (docs/design/gangs.md). The watch covers events
outside of the protocol's assumptions: a lost message, a defect. A task stalls when the scheduler
chose it to run, all its members have prepared it, and none of them has begun an operator of any
task for longer than a bound. The bound is `LEAST_S` plus `FACTOR` times the longest predicted task
that the members hold: an operator is never longer than its task.

The scheduler takes a stalled task back and plans it again, together with the tasks that its members
keep themselves free for. The instances drop them, and every wait between the instances ends.
"""

from __future__ import annotations

import math
from typing import Final

from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.reports import Heartbeat
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext

LEAST_S: Final = 10.0
FACTOR: Final = 4.0


class StallWatch:
    """Notes how long each prefill instance has stood still, and takes stalled tasks back."""

    def __init__(self, table: RequestTable) -> None:
        self.stalled = 0  # requests that were taken back
        self._table = table

    def heard(self, instance: PrefillInstance, report: Heartbeat, now_s: float) -> None:
        """Takes in a heartbeat."""
        before, still = instance.still_since_s, report.standstill
        prepared = () if still is None else still.prepared
        instance.still_since_s = {one: before.get(one, now_s) for one in prepared}
        instance.standstill = still

    def check(self, step: StepContext) -> None:
        """Takes stalled tasks back. The caller runs a scheduling round after it."""
        for pool in self._table.cluster.pools.values():
            for task in [task for task in pool.run_queue.ranked if self._stalls(task, step.now_s)]:
                self._take_back(step, task, pool.run_queue)

    @staticmethod
    def _stalls(task: Task, now_s: float) -> bool:
        if not task.chosen:
            return False
        since_s = max((_still_since_s(task, member) for member in task.members), default=None)
        if since_s is None or now_s - since_s <= LEAST_S:
            return False
        held = (one.predicted_s for member in task.members for one in member.queue)
        return now_s - since_s > LEAST_S + FACTOR * max(held, default=0.0)

    def _take_back(self, step: StepContext, task: Task, run_queue: RunQueue) -> None:
        if not any(request.id in run_queue.tasks for request in task.requests):
            return  # taken back with another stalled task
        found = {request.id for request in task.requests}
        waits = []
        for member in task.members:
            standstill, member.standstill, member.still_since_s = member.standstill, None, {}
            if standstill is not None:
                found.add(standstill.claimed)
                waits.append((member.id, standstill.waits_for))
        known = self._table.requests
        requests = [known[one] for one in sorted(found & known.keys())]
        taken = [one for one in requests if one.state is RequestState.PREFILLING]
        self.stalled += len(taken)
        step.stalled(tuple(one.id for one in taken), tuple(waits))
        for request in taken:
            self._table.take_back(step, request, "its prefill instances stood still")


def _still_since_s(task: Task, member: PrefillInstance) -> float:
    """Returns since when the member stands still with the task prepared; infinite if it does
    not."""
    since_s = member.still_since_s
    return min(since_s.get(request.id, math.inf) for request in task.requests)
