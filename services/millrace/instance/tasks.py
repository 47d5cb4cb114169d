"""Runs background tasks whose failures are always raised, and waits that end with them."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any

from millrace.concurrency import cancel


class Tasks:
    """Background tasks, spawned from the event loop; `watch` raises the first failure."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def watch(self) -> None:
        """Waits until a task fails, and raises its error."""
        await self._failed.wait()
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        """Cancels all tasks; returns when they have ended."""
        for task in self._running:
            task.cancel()
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._failed.set()


async def first_of(
    waits: Sequence[Awaitable[object]], workers: Sequence[asyncio.Task[None]]
) -> None:
    """Waits for the first of `waits` or `workers`. Raises its error, a worker's first; a worker
    that ended without error raises RuntimeError."""
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait([*waiting, *workers], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*waiting)
    for worker in workers:
        if worker.done():
            if not worker.cancelled():
                worker.result()
            raise RuntimeError(f"{worker.get_name()} ended by itself")
    for wait in waiting:
        if not wait.cancelled():
            wait.result()


def stacks() -> str:
    """Lists the stack of every asyncio task and thread of this process, for the log."""
    lines = []
    for task in asyncio.all_tasks():
        lines.append(task.get_name())
        lines += map(place_of, awaited_frames(task.get_coro()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}")
        frames: list[FrameType] = []
        frame: FrameType | None = top
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        lines += map(place_of, reversed(frames))
    return "\n".join(lines)


def awaited_frames(work: Any) -> Iterator[FrameType]:  # noqa: ANN401 - any awaited object
    """Yields the frames from a coroutine to the innermost awaited object."""
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is not None:
            yield frame
        if type(work).__name__ == "coroutine_wrapper":  # awaited by compiled code: gRPC's handlers
            (work,) = gc.get_referents(work)
        else:
            work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)


def place_of(frame: FrameType) -> str:
    """Returns file, line and function of a frame, for the log."""
    # The frame of a compiled function has no line.
    return f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
