"""Locks a resource for one job at a time, in the scheduler's current order.

The scheduler sets the order of an instance's jobs and may change it at any time
(`core.scheduler.effects.Order`). A released `PriorityLock` goes to the first waiting job of the
order at that moment, not to the job that began to wait first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class PriorityLock:
    """A lock that goes to the first waiting name of `order` when it is released.

    `order` lists names, the first name first. It is read at each release, so its owner may change
    it at any time. Names that are not in `order` come last. A change never takes the lock from its
    holder.
    """

    def __init__(self, order: Iterable[str]) -> None:
        self._order = order
        self._holder: str | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def acquire(self, name: str) -> None:
        """Waits for the lock. If the wait is cancelled, the caller does not have the lock."""
        if self._holder is None:  # then no name waits
            self._holder = name
            return
        given = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await given
        except asyncio.CancelledError:
            if self._waiting.get(name) is given:
                del self._waiting[name]
            else:
                self.release()  # given just before the cancellation
            raise

    def release(self) -> None:
        """Releases the lock to the next waiting name. Only the holder may call this."""
        self._holder = self._first(self._still_waiting())
        if self._holder is not None:
            self._waiting.pop(self._holder).set_result(None)

    async def give_way(self, name: str) -> None:
        """Lets waiting names that now come before `name`, the holder, have the lock first.

        If the wait to get the lock again is cancelled, the caller does not have the lock.
        """
        if self._first([name, *self._still_waiting()]) != name:
            self.release()
            await self.acquire(name)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Holds the lock during the block, unless `give_way` loses it."""
        await self.acquire(name)
        try:
            yield
        finally:
            if self._holder == name:
                self.release()

    def _still_waiting(self) -> list[str]:
        # A cancelled waiter removes itself only when its task runs again.
        return [name for name, given in self._waiting.items() if not given.done()]

    def _first(self, names: list[str]) -> str | None:
        ranks = {name: rank for rank, name in enumerate(self._order)}
        return min(names, key=lambda name: ranks.get(name, len(ranks)), default=None)
