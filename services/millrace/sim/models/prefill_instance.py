"""A simulated prefill instance: the tasks that it holds, under the rule of a live instance.

`core.instance.preemption.PreemptionRule` picks the task that runs, and by `core.instance.gang` the
members of a group start and stop together, as on a live instance. Three things differ from a live
instance.

- Messages between members take no time.
- To the rule one span of a group's task, from its start to its stop, is one operator.
  `PrefillTimes.boundary_s` says where inside the span the task may stop, so no event per operator
  is needed.
- Members have the tasks of all chunks at once. So a chunk that waits for the chunk before it keeps
  its turn at the members that join it, as in the queues of Tetris section 5.1. A live group has its
  task once the chunk before it is computed, and delays nothing until then.
"""

from __future__ import annotations

import sys
from typing import Final

from millrace.core.instance.gang import GangKey, GangSpec, Step
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.stop_point import StopPoint
from millrace.sim.cluster.job import Attempt, Task

#: A group may stop after each of its spans; no task is suspended that often.
_STOPS: Final = bytes([StopPoint.PASS]) * (1 << 16)


class HeldTask:
    """A task at one of its members, as the rule sees it."""

    __slots__ = ("awaits", "begun", "dropped", "gang", "mid_pass", "name", "task")

    def __init__(self, task: Task, instance_id: str) -> None:
        attempt, chunk = task.parts[0]
        key = GangKey(attempt.job.id, attempt.number, chunk.index)
        members = chunk.instance_ids
        self.task = task
        self.name = f"{key.request_id} {key.attempt} {key.chunk_index} {len(task.parts)}"
        self.gang: GangSpec | None = None
        if len(members) > 1:
            self.gang = GangSpec(
                key=key,
                members=members,
                me=instance_id,
                stops=_STOPS,
                last_stop=len(_STOPS) - 1,
            )
        self.awaits = False  # see `Task.can_start`
        self.begun = False
        self.mid_pass = False
        self.dropped = False


class PrefillInstance:
    """One incarnation of a prefill instance."""

    __slots__ = (
        "alive",
        "cancelled",
        "generation",
        "held",
        "id",
        "node",
        "rule",
        "tasks",
        "waits_since_s",
    )

    def __init__(self, instance_id: str, generation: int, node: str, finest: StopPoint) -> None:
        self.id = instance_id
        self.node = node
        self.generation = generation
        self.alive = True
        self.rule: PreemptionRule[HeldTask] = PreemptionRule(sys.maxsize)
        self.rule.finest = finest
        self.tasks: dict[Task, HeldTask] = {}  # unfinished
        self.waits_since_s: float | None = None  # idle, for a group's other members
        self.held: dict[str, Attempt] = {}
        self.cancelled: dict[Attempt, None] = {}  # dropped at the running task's boundary

    @property
    def running(self) -> Task | None:
        held = self.rule.running
        return None if held is None else held.task

    @property
    def wants_other(self) -> bool:
        """Returns whether another task goes before the running task."""
        return self.rule.first() is not self.rule.running

    def add(self, task: Task) -> None:
        """Takes a task in, after all tasks already held."""
        held = self.tasks[task] = HeldTask(task, self.id)
        self.rule.append([held.name])
        self.rule.add(held)

    def order(self, tasks: list[Task]) -> None:
        """Sets the order of the tasks from now on."""
        self.rule.order([self.tasks[task].name for task in tasks])

    def take_next(self) -> Task | None:
        """Returns the task to start now; None while there is none, or while a group is waited for.

        None, too, while the upcoming task waits for its earlier chunk, or belongs to an attempt
        that is over and not yet dropped.
        """
        while True:
            upcoming = self.rule.upcoming
            if upcoming is None or not upcoming.task.can_start:
                return None
            held = self.rule.next()
            if held is None:
                return None
            if held.gang is None or self.rule.begin(held, None) is Step.BEGIN:
                held.begun = True
                return held.task
            self.rule.leave(held)  # its members agreed to stop before it began

    def leave(self, task: Task) -> None:
        """Notes that the running task has stopped, to run again when it is first."""
        held = self.tasks[task]
        if held.gang is not None:
            self.rule.begin(held, None)  # STOP, unless the group broke up
        self.rule.leave(held)

    def remove(self, task: Task) -> None:
        """Removes a task that is over, or dropped."""
        held = self.tasks.pop(task, None)
        if held is not None:
            self.rule.forget([held.name])
            self.rule.remove(held)
