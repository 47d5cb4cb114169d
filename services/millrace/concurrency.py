"""Coroutines that run side by side: how they end together, and with the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, TypeVar

#: SIGHUP comes when the terminal is closed, or its connection is lost.
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: What a terminal sends to all processes of a command.
_TERMINAL_SIGNALS: Final = (signal.SIGINT, signal.SIGHUP)
_STEPS: Final = 4  # of a `Patience`

Result = TypeVar("Result")


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and returns when all have ended. Their results and errors stay in them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_or_first_error(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once and returns when all have returned. The first error cancels the others, and
    is raised when they have ended.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Runs all at once until one returns or raises, cancels the others, and then does the same."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        await cancel(*tasks)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` beside the block, and cancels it at the block's end. An error of `work` is raised
    after a block that raised none.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel(task)
    if not task.cancelled():
        task.result()


class Patience:
    """Gives the block `limit_s` seconds in which this process runs, and raises TimeoutError then.

    The limit passes in steps, and a step that is over late does not count: where the process was
    stopped or busy, the block gets what others have sent it meanwhile before time goes on.
    """

    __slots__ = ("_due_s", "_left", "_loop", "_scope", "_step_s", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._scope = asyncio.timeout(None)
        self._step_s = limit_s / _STEPS
        self._left = _STEPS
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._start(self._loop.time())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _start(self, now_s: float) -> None:
        self._due_s = now_s + self._step_s
        self._timer = self._loop.call_at(self._due_s, self._over)

    def _over(self) -> None:
        now_s = self._loop.time()
        self._left -= now_s - self._due_s < self._step_s
        if self._left:
            self._start(now_s)
        else:
            self._scope.reschedule(now_s)


def stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM, SIGINT and SIGHUP set."""
    stop = asyncio.Event()
    for number in _heard():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yields a `stop_event`, and gives the signals back at the end of the block."""
    try:
        yield stop_event()
    finally:
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


async def interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` in the task of a program that ends. The first stop signal cancels it, so that
    it cleans up, and KeyboardInterrupt is raised then. Where the signal finds the task computing,
    or comes again, KeyboardInterrupt is raised there and then.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = 0

    def interrupt(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1 or asyncio.current_task(loop) is task:
            raise KeyboardInterrupt
        task.cancel()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop up

    before = {number: signal.signal(number, interrupt) for number in _heard()}
    try:
        return await work
    except asyncio.CancelledError:
        if signals == 1:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal_to_parent() -> None:
    """Ignores what a terminal sends to all processes of a command: the parent process decides when
    this process ends.
    """
    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _heard() -> list[signal.Signals]:
    """Returns the stop signals, without SIGHUP under `nohup`, which starts commands that ignore
    it.
    """
    return [
        number
        for number in _STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
