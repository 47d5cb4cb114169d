"""Threads of simulated processes: each is a greenlet that runs only when the simulation says so.

`FiberThread` and `FiberCondition` stand in for `threading`'s in the modules whose threads compute,
`FiberExecutor` for the pools of one thread to which event loops give work.
A fiber gives the turn back between two operators (`boundary`), and while it waits. Torch's
inference mode is a thread's: each fiber has its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from support.fleet_sim.processes import Process, VirtualLoop, current

_MOST_TURNS = 10_000
#: The actions by which executors work, by their threads' names; others work by `turn`.
VERBS = {"decode-compute": "step"}


class Fiber:
    """A thread of a process. Its error is raised by the action that gave it the turn."""

    def __init__(self, process: Process, target: Callable[[], object], verb: str = "turn") -> None:
        self.is_ready = True  # else it waits
        self.verb = verb  # of the action that gives it the turn
        self._infers = False
        self._greenlet = greenlet(lambda: process.context.copy().run(target))
        process.fibers.append(self)

    @property
    def is_over(self) -> bool:
        return self._greenlet.dead

    @property
    def is_at_work(self) -> bool:
        return self.is_ready and not self.is_over

    def go_on(self) -> None:
        """Gives it the turn, until it gives the turn back."""
        with torch.inference_mode(self._infers):
            self._greenlet.switch()

    def give_back(self) -> None:
        self._infers = torch.is_inference_mode_enabled()
        self._greenlet.parent.switch()

    def end(self) -> None:
        """Its process dies."""
        with torch.inference_mode(self._infers):
            self._greenlet.throw(GreenletExit)

    @staticmethod
    def at_work() -> Fiber:
        """Returns the fiber that has the turn."""
        process, now = current(), getcurrent()
        assert process is not None
        return next(one for one in process.fibers if one._greenlet is now)


def boundary() -> None:
    """Ends an operator: whatever else may happen before the next."""
    Fiber.at_work().give_back()


class FiberThread:
    """In the place of threading.Thread."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._target = target
        self._fiber: Fiber | None = None

    def start(self) -> None:
        process = current()
        assert process is not None
        self._fiber = Fiber(process, self._target)

    def join(self) -> None:
        assert self._fiber is not None
        for _ in range(_MOST_TURNS):
            if self._fiber.is_over:
                return
            self._fiber.go_on()
        raise AssertionError("a thread does not end")


class FiberCondition:
    """In the place of threading.Condition. As one fiber runs at a time, nothing needs a lock."""

    def __init__(self) -> None:
        self._waiting: list[Fiber] = []

    def __enter__(self) -> FiberCondition:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def wait(self) -> None:
        fiber = Fiber.at_work()
        fiber.is_ready = False
        self._waiting.append(fiber)
        fiber.give_back()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.wait()

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.is_ready = True

    notify_all = notify


class FiberQueue:
    """In the place of queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = FiberCondition()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.notify()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get(self) -> Any:
        self._changed.wait_for(lambda: bool(self._items))
        return self._items.popleft()


class FiberExecutor:
    """In the place of concurrent.futures.ThreadPoolExecutor, with one thread. A piece of work is
    done when the simulation gives the thread the turn.
    """

    def __init__(self, threads: int, *, thread_name_prefix: str) -> None:
        assert threads == 1
        self._verb = VERBS.get(thread_name_prefix, "turn")
        self._work = FiberQueue()
        self._fiber: Fiber | None = None

    def submit(self, loop: VirtualLoop, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Returns what the work will return."""
        done = loop.create_future()
        self._work.put((loop, work, done))
        process = current()
        if self._fiber is None and process is not None:
            self._fiber = Fiber(process, self._run, self._verb)
        return done

    def _run(self) -> None:
        while True:
            loop, work, done = self._work.get()
            try:
                result, tell = work(), done.set_result
            except Exception as error:
                result, tell = error, done.set_exception
            loop.call_soon_threadsafe(_tell, done, tell, result)
            boundary()


def _tell(done: asyncio.Future[Any], tell: Callable[[Any], None], result: object) -> None:
    if not done.done():  # nobody waits any more
        tell(result)


def next_of(queue: FiberQueue, transport: object, timeout_s: float | None) -> Any:
    """In the place of `transfer.kvp.attentive.next_of`, for waits without a limit."""
    assert timeout_s is None
    return queue.get()
