"""Background tasks of which none fails unheard."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Spawned at any time from the event loop; the first that fails ends `watch` with its error."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def watch(self) -> None:
        """Waits until a task fails, and raises what it raised."""
        await self._failed.wait()
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        """Cancels all; returns when they have ended."""
        for task in self._running:
            task.cancel()
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._failed.set()
