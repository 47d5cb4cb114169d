"""Coroutines that run side by side: how they end together, and with the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


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


def stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in _STOP_SIGNALS:
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
