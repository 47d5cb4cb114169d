"""An event loop without a clock of its own, and the processes whose work it runs.

Time passes only when the simulation says so. Every task and timer belongs to the process in whose
context it was made: the work of a paused process waits, and that of a dead one is dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import count
from typing import Any

#: A process that runs so many callbacks in one moment never comes to rest.
MOST_AT_ONCE = 20_000

UNIX_S = 1_700_000_000.0

_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Nothing:
    """Stands for metrics that nobody reads."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Nothing:
        return self


NOTHING: Any = Nothing()


class Handle:
    """A callback that waits for its turn, or for its time."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context or copy_context()
        self.is_cancelled = False
        self.when_s = 0.0

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s


class Process:
    """What dies and stands still as one. A process that `has_lost` its outside world sends nothing
    and hears nothing any more, while its tasks end.
    """

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.loop = loop
        self.alive = True
        self.paused = False
        self.has_lost = False
        self.failure: BaseException | None = None  # of a task that must not end
        self.is_cut = False  # off from the store
        self.is_late = False  # its event loop stands still; its other threads work on
        self.fibers: list[Any] = []  # its threads that compute
        self.epoch_read = 0  # of the last message of a scheduler that it has read
        self.held: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs work in this process; its error ends the process."""
        task = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._ended)
        return task

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function as this process's work."""
        return self.context.copy().run(function, *args)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs a function later, when the process runs."""
        self.loop.call_soon(function, *args, context=self.context.copy())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()

    def kill(self) -> None:
        """Ends the process: nothing that it still does reaches any other."""
        self.has_lost, self.paused, self.is_late = True, False, False
        self.loop.resume(self)
        for fiber in self.fibers:
            fiber.end()
        for _ in range(10):
            open_tasks = [task for task in self.tasks if not task.done()]
            if not open_tasks:
                break
            for task in open_tasks:
                task.cancel()
            self.loop.run_ready()
        self.alive = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = self.is_late = False
        self.loop.resume(self)


def current() -> Process | None:
    """Returns the process whose work runs now."""
    return _PROCESS.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order in which they were made, and timers when time has passed."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._number = count()
        self.errors: list[dict[str, Any]] = []

    def time(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.unix_s() * 1e9)

    def unix_s(self) -> float:
        return UNIX_S + self.now_s

    # ---- what asyncio asks for

    def call_soon(self, callback, *args, context=None):
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        handle = Handle(callback, args, context)
        handle.when_s = when
        heapq.heappush(self._timers, (when, next(self._number), handle))
        return handle

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, *, name=None, context=None):
        context = context or copy_context()
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if (process := context.get(_PROCESS)) is not None:
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor, func, *args):
        """Runs work for another thread at once, unless the executor has threads of its own."""
        if executor is not None:
            return executor.submit(self, partial(func, *args))
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def get_debug(self):
        return False

    def is_running(self):
        return True

    def is_closed(self):
        return False

    def call_exception_handler(self, context):
        self.errors.append(context)

    # ---- what the simulation does

    def run_ready(self) -> None:
        """Runs all that can run without time passing."""
        ready = self._ready
        for _ in range(MOST_AT_ONCE):
            if not ready:
                return
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            process = handle.context.get(_PROCESS)
            if process is not None and (process.paused or process.is_late):
                process.held.append(handle)
            elif process is None or process.alive:
                handle.context.run(handle.callback, *handle.args)
        raise AssertionError(f"{MOST_AT_ONCE} callbacks ran in one moment")

    def next_timer_s(self) -> float | None:
        """Returns when the next timer is due."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance(self, seconds: float) -> None:
        """Lets time pass, timer by timer."""
        until_s = self.now_s + seconds
        while (due_s := self.next_timer_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            while self._timers and self._timers[0][0] <= self.now_s:
                handle = heapq.heappop(self._timers)[2]
                if not handle.is_cancelled:
                    self._ready.append(handle)
            self.run_ready()
        self.now_s = until_s

    def resume(self, process: Process) -> None:
        self._ready.extend(process.held)
        process.held.clear()


@contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """Runs the block on a new loop: all clocks are the loop's, and all pauses come of the seed."""
    loop = VirtualLoop()
    clocks = time.monotonic, time.time, time.time_ns, time.perf_counter
    state = random.getstate()
    random.seed(seed)
    logging.disable(logging.CRITICAL)
    time.monotonic = time.perf_counter = loop.time
    time.time, time.time_ns = loop.unix_s, loop.unix_ns
    asyncio.events._set_running_loop(loop)
    try:
        yield loop
    finally:
        asyncio.events._set_running_loop(None)
        time.monotonic, time.time, time.time_ns, time.perf_counter = clocks
        logging.disable(logging.NOTSET)
        random.setstate(state)
