"""The preemption rule: picks which of an instance's tasks runs, and where it stops.

The execution pool and the simulator run it. One task runs at a time, the first in the owner's order
(FlowPrefill section 4). A gang's task counts from the moment when all members have it. When it
comes first it claims the instance: nothing else runs until all members have claimed their instances
and the gang starts, or until it is released (`gang`). The rule has no threads and no clocks: the
pool holds a lock around it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final, Generic, Protocol, TypeVar

from millrace.core.instance.gang import (
    Gang,
    GangKey,
    GangSpec,
    Message,
    State,
    Step,
    answer_without_task,
)
from millrace.core.instance.stop_point import StopPoint


class Preemptible(Protocol):
    """A `ChunkTask` as the rule reads it, with the marks that the rule sets."""

    @property
    def name(self) -> str: ...
    @property
    def gang(self) -> GangSpec | None: ...

    begun: bool
    mid_pass: bool  # left in the middle of a pass, with activations
    dropped: bool  # it is to end, and never runs again
    awaits: bool  # the completion that it waits for: it runs when that is set


_LAST: Final = sys.maxsize

#: `standstill` describes at most this many tasks.
MOST_DESCRIBED: Final = 8

T = TypeVar("T", bound=Preemptible)


class PreemptionRule(Generic[T]):
    """The tasks of one instance, in their order.

    `outgoing` collects the messages to other instances, in this order: (instance, payload).
    """

    def __init__(self, most_held: int) -> None:
        """At most `most_held` tasks are left in the middle of a pass."""
        self.tasks: dict[str, T] = {}
        self.running: T | None = None
        self.finest = StopPoint.END
        self.outgoing: deque[tuple[str, bytes]] = deque()
        self.ranks: dict[str, int] = {}  # places in the owner's order, by name
        self.claimant: T | None = None  # the gang's task that nothing else may run beside
        self._next_rank = 0
        self._most_held = most_held
        self._gangs: dict[GangKey, Gang] = {}

    @property
    def held(self) -> int:
        """Returns the tasks suspended in the middle of a pass."""
        tasks = list(self.tasks.values())
        return sum(task.mid_pass for task in tasks if task is not self.running)

    @property
    def suspended(self) -> int:
        """Returns the tasks that have begun and wait to continue."""
        tasks = list(self.tasks.values())
        return sum(task.begun for task in tasks if task is not self.running)

    def first(self) -> T | None:
        """The first task that could run: it waits for nothing, and all members of its gang have it.

        Tasks without a rank go last, in the order in which they came."""
        found: T | None = None
        least = _LAST + 1
        ranks, gangs = self.ranks, self._gangs
        for name, task in self.tasks.items():  # written out: asked after every message
            rank = ranks.get(name, _LAST)
            if rank >= least or task.awaits:
                continue
            if task.gang is None or gangs[task.gang.key].is_open:
                found, least = task, rank
        return found

    def standstill(self) -> tuple[list[str], str, str] | None:
        """Returns the names of the prepared tasks, the task that claims the instance or runs (or
        ""), and, in words, what that task and the first task wait for. None where no task is
        prepared.
        """
        prepared = [task.name for task in self.tasks.values() if not task.awaits]
        if not prepared:
            return None
        at_work, first = self.running or self.claimant, self.first()
        described = self._described(at_work)
        waits = [f"{task.name} waits for {self._waits_for(task)}" for task in described]
        if at_work is not None and first is not None and first is not at_work:
            waits.append(f"{first.name} is first in its order")
        return prepared, at_work.name if at_work else "", "; ".join(waits)

    def _described(self, at_work: T | None) -> list[T]:
        """Returns the tasks that `standstill` describes: the task that has claimed the instance,
        else all.
        """
        return list(self.tasks.values())[:MOST_DESCRIBED] if at_work is None else [at_work]

    def _waits_for(self, task: T) -> str:
        gang = self.gang_of(task)
        return "its operator to end" if gang is None else gang.waits_for()

    # -- calls of the owner

    def add(self, task: T) -> None:
        """Takes a task in. Raises ValueError for a name that the pool has already."""
        if task.name in self.tasks:
            raise ValueError(f"a task {task.name!r} is in the pool")
        self.tasks[task.name] = task
        if task.gang is not None:
            gang = Gang(task.gang, self._say, self._finest_here)
            self._gangs[task.gang.key] = gang
            gang.enter()
        self.settle()

    def order(self, names: Sequence[str]) -> None:
        """Sets the order from now on.

        Names may be of tasks still to come; tasks not named go last.
        """
        self.ranks = dict(zip(dict.fromkeys(names), count(), strict=False))
        self._next_rank = len(self.ranks)
        self.settle()

    def append(self, names: Sequence[str]) -> None:
        """Puts these names after all others. So all members of a gang have one order from the
        beginning, whenever the tasks come.
        """
        for name in names:
            self.ranks.setdefault(name, self._next_rank)
            self._next_rank += 1
        self.settle()

    def forget(self, names: Sequence[str]) -> None:
        """Notes that no tasks of these names will come any more."""
        for name in names:
            self.ranks.pop(name, None)

    def remove(self, task: T) -> None:
        """Removes a task that is over or is taken out."""
        del self.tasks[task.name]
        if task.gang is not None:
            del self._gangs[task.gang.key]
        if task is self.claimant:
            self.claimant = None
        if task is self.running:
            self.running = None
        self.settle()

    def receive(self, sender: str, payload: bytes) -> None:
        """Takes in a message of another instance.

        Raises TransferError for bytes that no gang sends.
        """
        message = Message.decode(payload)
        gang = self._gangs.get(message.key)
        if gang is not None:
            before = gang.state, gang.is_open
            gang.hear(sender, message)
            if before != (gang.state, gang.is_open):
                self.settle()
        elif (answer := answer_without_task(message)) is not None:
            self._say(sender, answer)

    # -- calls of the thread that runs the tasks

    @property
    def upcoming(self) -> T | None:
        """Returns the task that `next` returns, now or when its gang has started."""
        return self.claimant or self.first()

    def next(self) -> T | None:
        """Returns the task to run now; None while there is none, or while a gang is waited for."""
        task = self.upcoming
        gang = self.gang_of(task)
        if gang is not None and not gang.has_started:
            return None
        self.running, self.claimant = task, None
        return task

    def leaves(self, task: T, ended: StopPoint) -> bool:
        """Returns whether the task, which has no gang, stops where `ended` has ended."""
        task.mid_pass = ended < StopPoint.PASS
        return not (self.first() is task or ended < self._finest_here())

    def begin(self, task: T, ended: StopPoint | None) -> Step:
        """Decides before each operator of a gang's task; `ended` is the end of the operator before,
        if any.

        Raises IntegrityError when `ended` is not what the gang's stops say.
        """
        gang = self.gang_of(task)
        assert gang is not None
        if ended is not None:
            gang.spec.check(gang.begun, ended)
        step = gang.begin()
        if step is Step.STOP:
            task.mid_pass = gang.spec.stops[gang.begun] < StopPoint.PASS
        return step

    def leave(self, task: T) -> None:
        """Notes that the task stopped at a point where it may stop."""
        self.running = None
        gang = self.gang_of(task)
        if gang is not None:
            gang.leave()
        self.settle()

    def settle(self) -> None:
        """Sends the gangs the messages that follow from the order."""
        first = self.first()
        at_work = self.gang_of(self.running or self.claimant)
        if at_work is not None and at_work is not self.gang_of(first):
            self._yield(at_work)
        if self.claimant is not None and at_work is not None and at_work.state is State.AWAY:
            self.claimant = None
        gang = self.gang_of(first)
        if gang is not None and self.running is None and self.claimant is None:
            self.claimant = first
            gang.be_ready()

    def _yield(self, gang: Gang) -> None:
        if gang.state is State.READY:
            gang.withdraw()
        elif self.finest < StopPoint.END:
            gang.ask_stop()

    def gang_of(self, task: T | None) -> Gang | None:
        """Returns this member's side of the task's gang; None for a task without one."""
        return None if task is None or task.gang is None else self._gangs[task.gang.key]

    def _finest_here(self) -> StopPoint:
        """Returns the finest point where the running task may stop now."""
        at_work = self.running or self.claimant
        held = sum(task.mid_pass for task in self.tasks.values() if task is not at_work)
        return self.finest if held < self._most_held else max(self.finest, StopPoint.PASS)

    def _say(self, to: str, message: Message) -> None:
        self.outgoing.append((to, message.encode()))
