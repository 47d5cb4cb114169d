"""Runs one computation at a time and keeps the others where they stopped (FlowPrefill section 4).

The pool decides nothing. Its owner, on another thread, says in which order the tasks are to go; the
pool's own thread runs the first of those it has, leaves it at its next boundary when another comes
to be first, and goes on with it later from there. What a task needs to go on is in the task: the
suspended generator holds its activations, its KV lies in its pages. A task of a gang starts and
stops together with those of other instances' pools (`core.instance.gang`).

A task may hold activations between two boundaries. At most `most_held` are suspended so; past that,
the one that runs goes on to the end of its pass, where it holds none. So the memory of suspended
tasks is bounded, and as there always is one that runs, nothing waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from millrace.core.instance.gang import GangSpec, Step
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.stop_point import StopPoint as StopPoint
from millrace.engine.completion import Completion

RUN_AHEAD_OPERATORS: Final = 4
"""Operators that the host may have enqueued on a GPU beyond the one that executes."""


@dataclass(eq=False, slots=True, kw_only=True)
class PoolTask:
    """A computation as a generator that yields at each boundary what has just ended, or what it
    awaits: then others run until that is ready, and it has given back its activations.

    The callbacks run on the pool's thread and return at once. `ended` gets what the generator
    raised, if anything; a dropped task has ended with `Dropped`.
    """

    name: str
    steps: Generator[StopPoint | Completion]
    resumed: Callable[[], None]  # begins, or goes on
    suspended: Callable[[], None]
    ended: Callable[[Exception | None], None]
    is_unwanted: Callable[[], bool] = lambda: False
    gang: GangSpec | None = None  # with whom it starts and stops; `steps` yields as its stops say
    subject: object = None  # the owner's
    compute_s: float = 0.0  # over all stretches that are over
    since_s: float = field(default=0.0, init=False)  # time.perf_counter at the stretch's begin
    begun: bool = field(default=False, init=False)
    mid_pass: bool = field(default=False, init=False)
    dropped: bool = field(default=False, init=False)
    awaits: bool = field(default=False, init=False)

    def spent_s(self) -> float:
        """Seconds of compute so far, for the task itself."""
        return self.compute_s + time.perf_counter() - self.since_s


class Dropped(Exception):
    """The task was dropped before its end."""


class ExecutionPool:
    """The thread, the tasks and their order. Methods may be called from any thread."""

    def __init__(
        self,
        device: torch.device,
        *,
        most_held: int,
        blocked: Callable[[float], None] = lambda seconds: None,
        send: Callable[[str, bytes], None] = lambda instance_id, payload: None,
    ) -> None:
        """`blocked` gets the seconds from each preemption's signal to its effect.

        `send` takes a payload to another instance's `receive`, those to one instance in order. It
        may be called on any thread that called the pool; it returns at once and raises nothing.
        """
        self._rule: PreemptionRule[PoolTask] = PreemptionRule(most_held)
        self._blocked = blocked
        self._send = send
        self._sending = threading.Lock()
        self._run_ahead = RunAhead(device)
        self._signal_s: float | None = None  # when the running task was asked to yield
        self._begun = 0  # operators, of all tasks
        self._told_begun = 0
        self._look = False  # the running task is to look whether it still is to run
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefill-compute", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._rule.running is not None

    @property
    def held(self) -> int:
        """Tasks suspended in the middle of a pass."""
        return self._rule.held

    @property
    def suspended(self) -> int:
        """Tasks that have begun and wait to go on."""
        return self._rule.suspended

    def standstill(self) -> tuple[list[str], str, str] | None:
        """`PreemptionRule.standstill`; None if an operator has begun or ended since the last call.

        One caller asks, regularly.
        """
        with self._changed:
            before, self._told_begun = self._told_begun, self._begun
            return self._rule.standstill() if before == self._begun else None

    def set_granularity(self, finest: StopPoint) -> None:
        """From the next boundary on, stops only where `finest` or more ends."""
        with self._changing():
            self._rule.finest = finest

    def submit(self, task: PoolTask) -> None:
        """Takes a task in; it runs when it is first. Raises ValueError for a name there is.

        A task that is unwanted already ends as one that is dropped: `drop_unwanted` may have looked
        a moment ago.
        """
        with self._changing():
            self._rule.add(task)
            task.dropped = task.is_unwanted()
            self._rearranged()

    def order(self, names: Sequence[str]) -> None:
        """The order from now on. Names may be of tasks still to come; tasks not named go last."""
        with self._changing():
            self._rule.order(names)
            self._rearranged()

    def append(self, names: Sequence[str]) -> None:
        """Puts names of tasks to come behind all in the order. Members of gangs do so with every
        command that they get: then all have one order, whoever has prepared its task first.
        """
        with self._changing():
            self._rule.append(names)
            self._rearranged()

    def forget(self, names: Sequence[str]) -> None:
        """No tasks of these names will come any more."""
        with self._changed:
            self._rule.forget(names)

    def receive(self, instance_id: str, payload: bytes) -> None:
        """Takes in what the instance's pool sent. Raises TransferError for anything else."""
        with self._changing():
            self._rule.receive(instance_id, payload)
            self._rearranged()  # a gang's task may count from now on

    def take(self, names: Sequence[str]) -> list[PoolTask]:
        """Takes those tasks out that are there, of no gang, and have not begun: the caller does
        their work.
        """
        with self._changing():
            found = (self._rule.tasks.get(name) for name in names)
            taken = [t for t in found if t and not (t.begun or t.dropped or t.gang)]
            for task in taken:
                self._rule.remove(task)
            return taken

    def drop_unwanted(self) -> None:
        """Ends the tasks that wait and that nobody wants any more. One that runs looks itself."""
        with self._changing():
            for task in self._rule.tasks.values():
                if task is not self._rule.running and task.is_unwanted():
                    task.dropped = self._look = True

    def close(self) -> None:
        """Drops every task and ends the thread, after the operator that runs."""
        with self._changing():
            self._closing = True
            for task in self._rule.tasks.values():
                task.dropped = True
            self._look = True
        self._thread.join()

    def _rearranged(self) -> None:
        running = self._rule.running
        if running is None or running is self._rule.first():
            self._signal_s = None  # taken back before it took effect
        elif self._signal_s is None and self._rule.finest < StopPoint.END:
            self._signal_s = time.perf_counter()
        self._look = True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock; then the thread looks again, and what is to be said goes out."""
        with self._changed:
            yield
            self._changed.notify()
        # One thread sends at a time, without the lock: in order, and whatever `send` does.
        while self._rule.outgoing and self._sending.acquire(blocking=False):
            try:
                while self._rule.outgoing:
                    self._send(*self._rule.outgoing.popleft())
            finally:
                self._sending.release()

    # -- on the pool's thread

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._advance(task)

    def _next(self) -> PoolTask | None:
        while True:
            self._end_dropped()
            with self._changed:
                task = self._rule.next()
                if task is not None:
                    if self._signal_s is not None:
                        self._blocked(time.perf_counter() - self._signal_s)
                    self._signal_s = None
                    self._look = False
                    return task
                if self._closing and not self._rule.tasks:
                    return None
                if not any(task.dropped for task in self._rule.tasks.values()):
                    self._changed.wait()

    def _advance(self, task: PoolTask) -> None:
        """Runs the task until it ends or is to yield."""
        error: Exception | None = None
        if task.dropped:
            error = _close(task)
        else:
            task.begun = True
            task.since_s = time.perf_counter()
            try:
                task.resumed()
                is_left = self._stretch(task) if task.gang is None else self._gang_stretch(task)
            except Exception as raised:
                is_left, error = False, raised
            task.compute_s = task.spent_s()
            if is_left and not task.dropped:
                task.suspended()
                with self._changing():
                    self._rule.leave(task)
                    task.dropped = task.is_unwanted()  # who looked a moment ago took it to run
                return
            if is_left:
                error = _close(task)
        self._run_ahead.settle()
        with self._changing():
            self._rule.remove(task)
        task.ended(error)

    def _stretch(self, task: PoolTask) -> bool:
        """True when the task was left, False when it ended. Raises what the task raises."""
        run_ahead = self._run_ahead
        for ended in task.steps:
            self._begun += 1
            if isinstance(ended, Completion):
                if self._awaits(task, ended):
                    return True
                continue
            run_ahead.step()
            if self._look and self._leaves(task, ended):
                return True
        return False

    def _awaits(self, task: PoolTask, awaited: Completion) -> bool:
        """True when the task is to be left until something is ready; False when that is."""
        with self._changed:
            task.awaits, task.mid_pass = True, False
        if awaited.then(lambda: self._ready(task)):
            return True
        task.awaits = False
        return task.dropped

    def _ready(self, task: PoolTask) -> None:
        """What the task awaits is there. On any thread."""
        with self._changing():
            task.awaits = False
            self._rule.settle()
            self._rearranged()

    def _leaves(self, task: PoolTask, ended: StopPoint) -> bool:
        self._end_dropped()
        with self._changed:
            if task.dropped:
                return True
            self._look = self._rule.first() is not task
            return self._rule.leaves(task, ended)

    def _gang_stretch(self, task: PoolTask) -> bool:
        """The same for a gang's task, which runs, holds and stops as the gang agrees."""
        ended: StopPoint | None = None
        while self._may_begin(task, ended):
            step = next(task.steps, None)
            if step is None:
                return False
            assert isinstance(step, StopPoint)  # members of a gang run in step, and await nobody
            ended = step
            self._begun += 1
            self._run_ahead.step()
        return True

    def _may_begin(self, task: PoolTask, ended: StopPoint | None) -> bool:
        while True:
            if self._look:
                self._look = False
                self._end_dropped()
            with self._changed:
                if task.dropped:
                    return False
                step = self._rule.begin(task, ended)
                if step is Step.WAIT:
                    task.dropped = task.is_unwanted()  # else the leader's word comes
                    if not (task.dropped or self._look):
                        self._changed.wait()
                    continue
                return step is Step.BEGIN

    def _end_dropped(self) -> None:
        """Ends what waits and was dropped. Here, for what it frees belongs to this thread."""
        with self._changing():
            tasks = self._rule.tasks.values()
            gone = [t for t in tasks if t.dropped and t is not self._rule.running]
            for task in gone:
                self._rule.remove(task)
        for task in gone:
            task.ended(_close(task))


class RunAhead:
    """Keeps the host within a few operators of the GPU, so that a stop takes effect within them.

    An event after each operator, and a wait for the one `RUN_AHEAD_OPERATORS` back: the device
    always has work queued, and no stream is synchronised. On the CPU an operator has run when it
    returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._events: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """After each operator was enqueued."""
        if self._device is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        if len(self._events) > RUN_AHEAD_OPERATORS:
            self._events.popleft().synchronize()

    def settle(self) -> None:
        """Forgets the events of a task that is over."""
        self._events.clear()


def _close(task: PoolTask) -> Exception:
    """Ends a task's generator where it stands."""
    task.steps.close()
    return Dropped(task.name)
