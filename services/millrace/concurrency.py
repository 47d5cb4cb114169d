"""Coroutines that run side by side: how they end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


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
