"""What a worker asks of all that it is made of: whether it lives, and whether it is empty."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from millrace.engine.assembly import KvMemory
from millrace.engine.errors import EngineDied


class Holder(Protocol):
    """Has something of requests while there are some."""

    def check_integrity(self) -> None:
        """Raises IntegrityError when it has something although it is idle."""


def check_idle(*holders: Holder) -> None:
    """Raises IntegrityError when one of them has anything left of a request."""
    for holder in holders:
        holder.check_integrity()


async def watch(memory: KvMemory) -> None:
    """Raises EngineDied when a process of an engine has died, whether it is in use or not."""
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
