"""Runs one computation at a time and keeps the others where they stopped (FlowPrefill section 4).

The pool decides nothing. Its owner, on another thread, says in which order the tasks are to go; the
pool's own thread runs the first of those it has, leaves it at its next boundary when another comes
to be first, and goes on with it later from there. What a task needs to go on is in the task: the
suspended generator holds its activations, its KV lies in its pages.

A task may hold activations between two boundaries. At most `most_held` are suspended so; past that,
the one that runs goes on to the end of its pass, where it holds none. So the memory of suspended
tasks is bounded, and as there always is one that runs, nothing waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import torch

RUN_AHEAD_OPERATORS: Final = 4
"""Operators that the host may have enqueued on a GPU beyond the one that executes."""

_LAYER_ENDS: Final = ("down_proj", "experts")


class StopPoint(IntEnum):
    """What ends where a task may be left, the finest first."""

    OPERATOR = 0
    LAYER = 1
    PASS = 2  # a chunk of at most engine.max_chunk_tokens: no activations are held
    END = 3

    @classmethod
    def of(cls, granularity: str) -> StopPoint:
        """The finest that `scheduler.preemption` allows a stop at."""
        return {"operator": cls.OPERATOR, "layer": cls.LAYER, "chunk": cls.PASS, "none": cls.END}[
            granularity
        ]

    @classmethod
    def after(cls, operator: str) -> StopPoint:
        """What ends with an operator of a forward pass."""
        return cls.LAYER if operator in _LAYER_ENDS else cls.OPERATOR


@dataclass(eq=False, slots=True, kw_only=True)
class PoolTask:
    """A computation as a generator that yields at each boundary what has just ended.

    The callbacks run on the pool's thread and return at once. `ended` gets what the generator
    raised, if anything; a dropped task has ended with `Dropped`.
    """

    name: str
    steps: Generator[StopPoint]
    resumed: Callable[[], None]  # begins, or goes on
    suspended: Callable[[], None]
    ended: Callable[[Exception | None], None]
    is_unwanted: Callable[[], bool] = lambda: False
    subject: object = None  # the owner's
    compute_s: float = 0.0  # over all stretches that are over
    since_s: float = field(default=0.0, init=False)  # time.perf_counter at the stretch's begin
    begun: bool = field(default=False, init=False)
    mid_pass: bool = field(default=False, init=False)
    dropped: bool = field(default=False, init=False)

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
    ) -> None:
        """`blocked` gets the seconds from each preemption's signal to its effect."""
        self._tasks: dict[str, PoolTask] = {}
        self._ranks: dict[str, int] = {}
        self._finest = StopPoint.END
        self._most_held = most_held
        self._blocked = blocked
        self._run_ahead = RunAhead(device)
        self._running: PoolTask | None = None
        self._signal_s: float | None = None  # when the running task was asked to yield
        self._look = False  # the running task is to look whether it still is to run
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefill-compute", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def held(self) -> int:
        """Tasks suspended in the middle of a pass."""
        tasks = list(self._tasks.values())
        return sum(task.mid_pass for task in tasks if task is not self._running)

    @property
    def suspended(self) -> int:
        """Tasks that have begun and wait to go on."""
        tasks = list(self._tasks.values())
        return sum(task.begun for task in tasks if task is not self._running)

    def set_granularity(self, finest: StopPoint) -> None:
        """From the next boundary on, stops only where `finest` or more ends."""
        with self._changed:
            self._finest = finest

    def submit(self, task: PoolTask) -> None:
        """Takes a task in; it runs when it is first. Raises ValueError for a name there is."""
        with self._changed:
            if task.name in self._tasks:
                raise ValueError(f"a task {task.name!r} is in the pool")
            self._tasks[task.name] = task
            self._rearranged()

    def order(self, names: Sequence[str]) -> None:
        """The order from now on. Names may be of tasks still to come; tasks not named go last."""
        with self._changed:
            self._ranks = {name: rank for rank, name in enumerate(dict.fromkeys(names))}
            self._rearranged()

    def take(self, names: Sequence[str]) -> list[PoolTask]:
        """Takes those tasks out that are there and have not begun: the caller does their work."""
        with self._changed:
            found = (self._tasks.get(name) for name in names)
            taken = [task for task in found if task and not (task.begun or task.dropped)]
            for task in taken:
                del self._tasks[task.name]
            return taken

    def drop_unwanted(self) -> None:
        """Ends the tasks that wait and that nobody wants any more. One that runs looks itself."""
        with self._changed:
            for task in self._tasks.values():
                if task is not self._running and task.is_unwanted():
                    task.dropped = self._look = True
            self._changed.notify()

    def close(self) -> None:
        """Drops every task and ends the thread, after the operator that runs."""
        with self._changed:
            self._closing = True
            for task in self._tasks.values():
                task.dropped = True
            self._look = True
            self._changed.notify()
        self._thread.join()

    def _rearranged(self) -> None:
        first = self._first()
        running = self._running
        if running is None or running is first:
            self._signal_s = None  # taken back before it took effect
        elif self._signal_s is None and self._finest < StopPoint.END:
            self._signal_s = time.perf_counter()
        self._look = True
        self._changed.notify()

    def _first(self) -> PoolTask | None:
        last = len(self._ranks)
        return min(
            self._tasks.values(),
            key=lambda task: self._ranks.get(task.name, last),
            default=None,
        )

    # -- on the pool's thread

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._advance(task)

    def _next(self) -> PoolTask | None:
        self._end_dropped()
        with self._changed:
            while (first := self._first()) is None:
                if self._closing:
                    return None
                self._running = None
                self._changed.wait()
            if self._signal_s is not None and self._running is not first:
                self._blocked(time.perf_counter() - self._signal_s)
            self._signal_s = None
            self._running = first
            self._look = False
            return first

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
                is_left = self._stretch(task)
            except Exception as raised:
                is_left, error = False, raised
            task.compute_s = task.spent_s()
            if is_left and not task.dropped:
                task.suspended()
                with self._changed:
                    self._running = None
                    task.dropped = task.is_unwanted()  # who looked a moment ago took it to run
                return
            if is_left:
                error = _close(task)
        self._run_ahead.settle()
        with self._changed:
            del self._tasks[task.name]
            self._running = None
        task.ended(error)

    def _stretch(self, task: PoolTask) -> bool:
        """True when the task was left, False when it ended. Raises what the task raises."""
        run_ahead = self._run_ahead
        for boundary in task.steps:
            run_ahead.step()
            if self._look and self._leaves(task, boundary):
                return True
        return False

    def _leaves(self, task: PoolTask, boundary: StopPoint) -> bool:
        self._end_dropped()
        with self._changed:
            task.mid_pass = boundary < StopPoint.PASS
            if task.dropped:
                return True
            if self._first() is task:
                self._look = False
                return False
            if boundary < self._finest:
                return False
            return not task.mid_pass or self.held < self._most_held

    def _end_dropped(self) -> None:
        """Ends what waits and was dropped. Here, for what it frees belongs to this thread."""
        with self._changed:
            gone = [t for t in self._tasks.values() if t.dropped and t is not self._running]
            for task in gone:
                del self._tasks[task.name]
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
