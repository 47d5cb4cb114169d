"""Runs one computation at a time and keeps the others where they stopped (FlowPrefill section 4).

The pool decides nothing. Its owner, on another thread, sets the order of the tasks. The pool's own
thread runs the first task that it has, leaves it at its next boundary when another task becomes the
first, and continues it later from that boundary. A task holds all that it needs to continue: the
suspended generator holds its activations, and its KV lies in its pages. A gang's task starts and
stops together with the tasks of other instances' pools (`core.instance.gang`).

A task may hold activations between two boundaries. At most `most_held` tasks are suspended with
activations; past that number, the running task continues to the end of its pass, where it holds
none. So the memory of suspended tasks is bounded, and since one task always runs, nothing waits for
ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch

from millrace.core.instance.gang import GangSpec, Step
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.stop_point import StopPoint as StopPoint
from millrace.engine.completion import Completion
from millrace.engine.device.run_ahead import Pace, RunAhead


class ChunkTask:
    """The instance's task: a chunk, as its execution pool computes it.

    Its kinds are `LocalChunk` and `RingChunk` (`prefill.compute`). The scheduler's task is the same
    chunk on all its instances.

    ``steps`` computes the chunk: a generator that yields, at each boundary, the stop point that has
    been reached; a gang's as the stops of ``gang`` say. It may yield a completion instead, after
    giving back its activations: other tasks run until the completion is set. ``pace``: of the pass
    that it computes; it names the operator before the boundary.

    The pool's thread calls the methods, which return at once; any thread calls `is_unwanted`.
    """

    def __init__(
        self, name: str, steps: Generator[StopPoint | Completion], gang: GangSpec | None = None
    ) -> None:
        self.name = name
        self.steps = steps
        self.gang = gang
        self.pace = Pace()
        self.joins_tokens = 0
        self.compute_s = 0.0  # over all spans that have ended
        self.since_s = 0.0  # time.perf_counter at the start of the span
        self.begun = False
        self.mid_pass = False
        self.dropped = False
        self.awaits = False

    def resumed(self) -> None:
        """Notes that the task begins or continues."""

    def suspended(self) -> None:
        """Notes that another task may run until `resumed`."""

    def ended(self, error: Exception | None) -> None:
        """Takes the exception that `steps` raised, if any: `TaskDropped` of a dropped task."""

    def is_unwanted(self) -> bool:
        """Returns whether the task may be dropped."""
        return False

    def spent_s(self) -> float:
        """Returns the seconds of compute so far; called by the task itself."""
        return self.compute_s + time.perf_counter() - self.since_s


class TaskDropped(Exception):
    """The task was dropped before its end."""


class ExecutionPool:
    """Holds the thread, the tasks and their order. Methods may be called from any thread."""

    def __init__(
        self,
        device: torch.device,
        *,
        most_held: int,
        blocked: Callable[[float], None] = lambda seconds: None,
        send: Callable[[str, bytes], None] = lambda instance_id, payload: None,
    ) -> None:
        """`blocked` gets the seconds from each preemption's signal to its effect.

        `send` takes a payload to another instance's `receive`, payloads to one instance in order.
        It may be called on any thread that called the pool; it returns at once and raises nothing.
        """
        self._rule: PreemptionRule[ChunkTask] = PreemptionRule(most_held)
        self._blocked = blocked
        self._send = send
        self._sending = threading.Lock()
        self._run_ahead = RunAhead(device)
        self._signal_s: float | None = None  # when the running task was asked to yield
        self._begun = 0  # operators, of all tasks
        self._reported_begun = 0
        self._look = False  # the running task must check whether it may still run
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefill-compute", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._rule.running is not None

    @property
    def held(self) -> int:
        """Returns the tasks suspended in the middle of a pass."""
        return self._rule.held

    @property
    def suspended(self) -> int:
        """Returns the tasks that have begun and wait to continue."""
        return self._rule.suspended

    def standstill(self) -> tuple[list[str], str, str] | None:
        """Returns `PreemptionRule.standstill`; None if an operator has begun or ended since the
        last call.

        Only one caller may call it, at regular times.
        """
        with self._changed:
            before, self._reported_begun = self._reported_begun, self._begun
            return self._rule.standstill() if before == self._begun else None

    def set_granularity(self, finest: StopPoint) -> None:
        """Sets the stops: from the next boundary on, a task stops only where `finest` or more
        ends."""
        with self._changing():
            self._rule.finest = finest

    def submit(self, task: ChunkTask) -> None:
        """Takes a task in; it runs when it is first.

        Raises ValueError for a name that the pool has.

        A task that is already unwanted ends as a dropped task does: `drop_unwanted` may have run a
        moment ago.
        """
        with self._changing():
            self._rule.add(task)
            task.dropped = task.is_unwanted()
            self._rearranged()

    def order(self, names: Sequence[str]) -> None:
        """Sets the order from now on.

        Names may be of tasks still to come; tasks not named go last.
        """
        with self._changing():
            self._rule.order(names)
            self._rearranged()

    def append(self, names: Sequence[str]) -> None:
        """Puts names of tasks to come after all others in the order.

        Members of gangs call it for every command that they get: then all members have one order,
        in whatever order they prepare their tasks.
        """
        with self._changing():
            self._rule.append(names)
            self._rearranged()

    def forget(self, names: Sequence[str]) -> None:
        """Notes that no tasks of these names will come any more."""
        with self._changed:
            self._rule.forget(names)

    def receive(self, instance_id: str, payload: bytes) -> None:
        """Takes in a message of another instance's pool.

        Raises TransferError for any other bytes.
        """
        with self._changing():
            self._rule.receive(instance_id, payload)
            self._rearranged()  # a gang's task may count from now on

    def take(self, names: Sequence[str], room_tokens: int) -> list[ChunkTask]:
        """Takes out those of the tasks, in this order, that are in the pool, have not begun, and
        whose `joins_tokens` fit into the room that is left.

        The caller does their work.
        """
        with self._changing():
            taken: list[ChunkTask] = []
            for task in [self._rule.tasks[name] for name in names if name in self._rule.tasks]:
                is_waiting = not (task.begun or task.dropped)
                if is_waiting and 0 < task.joins_tokens <= room_tokens:
                    room_tokens -= task.joins_tokens
                    self._rule.remove(task)
                    taken.append(task)
            return taken

    def drop_unwanted(self) -> None:
        """Ends the waiting tasks that are not wanted any more. A running task checks by itself."""
        with self._changing():
            for task in self._rule.tasks.values():
                if task is not self._rule.running and task.is_unwanted():
                    task.dropped = self._look = True

    def close(self) -> None:
        """Drops every task and ends the thread, after the running operator."""
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
        """Holds the lock; then makes the thread check again, and sends the pending messages."""
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

    @torch.inference_mode()
    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._advance(task)

    def _next(self) -> ChunkTask | None:
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

    def _advance(self, task: ChunkTask) -> None:
        """Runs the task until it ends or must yield."""
        error: Exception | None = None
        if task.dropped:
            error = _close(task)
        else:
            task.begun = True
            task.since_s = time.perf_counter()
            try:
                task.resumed()
                is_left = self._run_span(task) if task.gang is None else self._run_gang(task)
            except Exception as raised:
                is_left, error = False, raised
            task.compute_s = task.spent_s()
            if is_left and not task.dropped:
                task.suspended()
                with self._changing():
                    self._rule.leave(task)
                    task.dropped = task.is_unwanted()  # `drop_unwanted` saw it running
                return
            if is_left:
                error = _close(task)
        self._run_ahead.settle()
        with self._changing():
            self._rule.remove(task)
        task.ended(error)

    def _run_span(self, task: ChunkTask) -> bool:
        """Runs the task; True when it was left, False when it ended.

        Raises what the task raises.
        """
        run_ahead = self._run_ahead
        for ended in task.steps:
            self._begun += 1
            if isinstance(ended, Completion):
                if self._awaits(task, ended):
                    return True
                continue
            if ended < StopPoint.PASS:
                run_ahead.step(task.pace, lambda: self._look)
            if self._look and self._leaves(task, ended):
                return True
        return False

    def _awaits(self, task: ChunkTask, awaited: Completion) -> bool:
        """Returns True when the task must be left until its completion is set; False when it is
        set.
        """
        with self._changed:
            task.awaits, task.mid_pass = True, False
        if awaited.then(lambda: self._ready(task)):
            return True
        task.awaits = False
        return task.dropped

    def _ready(self, task: ChunkTask) -> None:
        """Notes that the task's completion is set. Called on any thread."""
        with self._changing():
            task.awaits = False
            self._rule.settle()
            self._rearranged()

    def _leaves(self, task: ChunkTask, ended: StopPoint) -> bool:
        self._end_dropped()
        with self._changed:
            if task.dropped:
                return True
            self._look = self._rule.first() is not task
            return self._rule.leaves(task, ended)

    def _run_gang(self, task: ChunkTask) -> bool:
        """Runs a gang's task, which runs, holds and stops as the gang agrees; returns as
        `_run_span`.
        """
        ended: StopPoint | None = None
        while self._may_begin(task, ended):
            step = next(task.steps, None)
            if step is None:
                return False
            assert isinstance(step, StopPoint)  # gangs wait for nothing else
            ended = step
            self._begun += 1
            if step < StopPoint.PASS:
                self._run_ahead.step(task.pace, lambda: self._look)
        return True

    def _may_begin(self, task: ChunkTask, ended: StopPoint | None) -> bool:
        while True:
            if self._look:
                self._look = False
                self._end_dropped()
            with self._changed:
                if task.dropped:
                    return False
                step = self._rule.begin(task, ended)
                if step is Step.WAIT:
                    task.dropped = task.is_unwanted()  # else the leader's message comes
                    if not (task.dropped or self._look):
                        self._changed.wait()
                    continue
                return step is Step.BEGIN

    def _end_dropped(self) -> None:
        """Ends waiting tasks that were dropped.

        On this thread, which owns the memory that this frees.
        """
        with self._changing():
            tasks = self._rule.tasks.values()
            gone = [t for t in tasks if t.dropped and t is not self._rule.running]
            for task in gone:
                self._rule.remove(task)
        for task in gone:
            task.ended(_close(task))


def _close(task: ChunkTask) -> Exception:
    """Closes a task's generator where it is suspended."""
    task.steps.close()
    return TaskDropped(task.name)
