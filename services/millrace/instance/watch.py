"""Checks a worker's components: whether the engine lives, and whether idle components are empty."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from millrace.engine.assembly import KvMemory
from millrace.engine.errors import EngineDied


class Holder(Protocol):
    """A component that holds state of requests."""

    def check_integrity(self) -> None:
        """Raises IntegrityError when the component is idle but holds state of a request."""


def check_idle(*holders: Holder) -> None:
    """Raises IntegrityError when a component holds state of a request."""
    for holder in holders:
        holder.check_integrity()


async def watch(memory: KvMemory) -> None:
    """Waits, and raises EngineDied when a process of the engine dies, in use or not."""
    loop = asyncio.get_running_loop()
    fell: asyncio.Future[EngineDied] = loop.create_future()

    def on_death(error: EngineDied) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            loop.call_soon_threadsafe(_resolve, fell, error)

    memory.when_died(on_death)
    raise await fell


def _resolve(fell: asyncio.Future[EngineDied], error: EngineDied) -> None:
    if not fell.done():
        fell.set_result(error)
