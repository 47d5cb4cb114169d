"""Picks which of an instance's tasks runs, and where it is left: the preemption rule.

The execution pool and the simulator run it. One task runs at a time, the first in the owner's
order (FlowPrefill section 4). A gang's task counts
from the moment when all members have it. When it comes first it claims the instance: nothing else
runs until all members have claimed theirs and the gang starts, or until it is released (`gang`).
No threads and no clocks: the pool holds a lock around the rule.
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


class Task(Protocol):
    """A task as the rule reads it, with the marks that the rule sets."""

    @property
    def name(self) -> str: ...
    @property
    def gang(self) -> GangSpec | None: ...

    begun: bool
    mid_pass: bool  # left in the middle of a pass, with activations
    dropped: bool  # it is to end, and never runs again
    awaits: bool  # something that is to come: it runs when that is there


_LAST: Final = sys.maxsize

#: `standstill` says of this many tasks what they wait for.
MOST_DESCRIBED: Final = 8

T = TypeVar("T", bound=Task)


class PreemptionRule(Generic[T]):
    """The tasks of one instance, in their order.

    `outgoing` collects what is to be sent to other instances, in this order: (instance, payload).
    """

    def __init__(self, most_held: int) -> None:
        """At most `most_held` tasks are left in the middle of a pass."""
        self.tasks: dict[str, T] = {}
        self.running: T | None = None
        self.finest = StopPoint.END
        self.outgoing: deque[tuple[str, bytes]] = deque()
        self._ranks: dict[str, int] = {}
        self._next_rank = 0
        self._most_held = most_held
        self._gangs: dict[GangKey, Gang] = {}
        self._claimant: T | None = None  # the gang's task that nothing else may run beside

    @property
    def held(self) -> int:
        """Tasks suspended in the middle of a pass."""
        tasks = list(self.tasks.values())
        return sum(task.mid_pass for task in tasks if task is not self.running)

    @property
    def suspended(self) -> int:
        """Tasks that have begun and wait to go on."""
        tasks = list(self.tasks.values())
        return sum(task.begun for task in tasks if task is not self.running)

    def first(self) -> T | None:
        """The first task of those that could run: they await nothing, and all members of a gang
        have its task. Tasks without a rank go last, in the order in which they came."""
        found: T | None = None
        least = _LAST + 1
        ranks, gangs = self._ranks, self._gangs
        for name, task in self.tasks.items():  # written out: asked after every message
            rank = ranks.get(name, _LAST)
            if rank >= least or task.awaits:
                continue
            if task.gang is None or gangs[task.gang.key].is_open:
                found, least = task, rank
        return found

    def standstill(self) -> tuple[list[str], str, str] | None:
        """Names of the tasks that are prepared, the one that claims the instance or runs (or ""),
        and what it and the first one wait for, in words. None where no task is prepared.
        """
        prepared = [task.name for task in self.tasks.values() if not task.awaits]
        if not prepared:
            return None
        at_work, first = self.running or self._claimant, self.first()
        described = self._described(at_work)
        waits = [f"{task.name} waits for {self._waits_for(task)}" for task in described]
        if at_work is not None and first is not None and first is not at_work:
            waits.append(f"{first.name} is first in its order")
        return prepared, at_work.name if at_work else "", "; ".join(waits)

    def _described(self, at_work: T | None) -> list[T]:
        """Of whom `standstill` tells: what has claimed the instance, else all."""
        return list(self.tasks.values())[:MOST_DESCRIBED] if at_work is None else [at_work]

    def _waits_for(self, task: T) -> str:
        gang = self._gang_of(task)
        return "its operator to end" if gang is None else gang.waits_for()

    # -- calls of the owner

    def add(self, task: T) -> None:
        """Raises ValueError for a name there is."""
        if task.name in self.tasks:
            raise ValueError(f"a task {task.name!r} is in the pool")
        self.tasks[task.name] = task
        if task.gang is not None:
            gang = Gang(task.gang, self._say, self._finest_here)
            self._gangs[task.gang.key] = gang
            gang.enter()
        self.settle()

    def order(self, names: Sequence[str]) -> None:
        """The order from now on. Names may be of tasks still to come; tasks not named go last."""
        self._ranks = dict(zip(dict.fromkeys(names), count(), strict=False))
        self._next_rank = len(self._ranks)
        self.settle()

    def append(self, names: Sequence[str]) -> None:
        """Puts these names after all others. So all members of a gang have one order from the
        beginning, whenever the tasks come.
        """
        for name in names:
            self._ranks.setdefault(name, self._next_rank)
            self._next_rank += 1
        self.settle()

    def forget(self, names: Sequence[str]) -> None:
        """No tasks of these names will come any more."""
        for name in names:
            self._ranks.pop(name, None)

    def remove(self, task: T) -> None:
        """The task is over, or taken out."""
        del self.tasks[task.name]
        if task.gang is not None:
            del self._gangs[task.gang.key]
        if task is self._claimant:
            self._claimant = None
        if task is self.running:
            self.running = None
        self.settle()

    def receive(self, sender: str, payload: bytes) -> None:
        """Takes in what another instance says. Raises TransferError for what no gang says."""
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
        """The task that `next` gives, now or when its gang has started."""
        return self._claimant or self.first()

    def next(self) -> T | None:
        """The task to run now; None while there is none, or while a gang is waited for."""
        task = self.upcoming
        gang = self._gang_of(task)
        if gang is not None and not gang.has_started:
            return None
        self.running, self._claimant = task, None
        return task

    def leaves(self, task: T, ended: StopPoint) -> bool:
        """Whether the task, of no gang, is left where `ended` has ended."""
        task.mid_pass = ended < StopPoint.PASS
        return not (self.first() is task or ended < self._finest_here())

    def begin(self, task: T, ended: StopPoint | None) -> Step:
        """Asked before each operator of a gang's task: `ended` with the one before, if any.

        Raises IntegrityError when that is not what the gang's stops say.
        """
        gang = self._gang_of(task)
        assert gang is not None
        if ended is not None:
            gang.spec.check(gang.begun, ended)
        step = gang.begin()
        if step is Step.STOP:
            task.mid_pass = gang.spec.stops[gang.begun] < StopPoint.PASS
        return step

    def leave(self, task: T) -> None:
        """The task was left, where it may be."""
        self.running = None
        gang = self._gang_of(task)
        if gang is not None:
            gang.leave()
        self.settle()

    def settle(self) -> None:
        """Says to the gangs what follows from the order."""
        first = self.first()
        at_work = self._gang_of(self.running or self._claimant)
        if at_work is not None and at_work is not self._gang_of(first):
            self._yield(at_work)
        if self._claimant is not None and at_work is not None and at_work.state is State.AWAY:
            self._claimant = None
        gang = self._gang_of(first)
        if gang is not None and self.running is None and self._claimant is None:
            self._claimant = first
            gang.be_ready()

    def _yield(self, gang: Gang) -> None:
        if gang.state is State.READY:
            gang.withdraw()
        elif self.finest < StopPoint.END:
            gang.ask_stop()

    def _gang_of(self, task: T | None) -> Gang | None:
        return None if task is None or task.gang is None else self._gangs[task.gang.key]

    def _finest_here(self) -> StopPoint:
        """Where what is at work may be left now."""
        at_work = self.running or self._claimant
        held = sum(task.mid_pass for task in self.tasks.values() if task is not at_work)
        return self.finest if held < self._most_held else max(self.finest, StopPoint.PASS)

    def _say(self, to: str, message: Message) -> None:
        self.outgoing.append((to, message.encode()))
