"""Who of an instance's jobs goes next.

The scheduler says in which order the jobs that an instance holds are to go, and may say so anew at
any time (`core.scheduler.effects.Order`). What one job at a time may have is an `PriorityLock`; it
is given away by the order of that moment, never by who began to wait first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class PriorityLock:
    """One has it; when it comes free, the first of those who wait gets it.

    `order` names who may wait, first to go first. It is read whenever the turn passes on, so its
    owner just changes it. Who waits without being named goes last. Nobody loses the turn by a
    change: it goes on from whoever has it, when it is released.
    """

    def __init__(self, order: Iterable[str]) -> None:
        self._order = order
        self._holder: str | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def acquire(self, name: str) -> None:
        """Waits for the turn. Cancelled while it waits, or just before it goes on, it has none."""
        if self._holder is None:  # then nobody waits
            self._holder = name
            return
        given = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await given
        except asyncio.CancelledError:
            if self._waiting.get(name) is given:
                del self._waiting[name]
            else:
                self.release()  # given in the moment of the cancellation
            raise

    def release(self) -> None:
        """Hands the turn over. Only its holder may call this."""
        self._holder = self._first(self._still_waiting())
        if self._holder is not None:
            self._waiting.pop(self._holder).set_result(None)

    async def give_way(self, name: str) -> None:
        """The holder lets those go first who are to go before it by now.

        Cancelled while it waits to have the turn again, it has none.
        """
        if self._first([name, *self._still_waiting()]) != name:
            self.release()
            await self.acquire(name)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """The turn for as long as the block lasts, if it is not lost in `give_way`."""
        await self.acquire(name)
        try:
            yield
        finally:
            if self._holder == name:
                self.release()

    def _still_waiting(self) -> list[str]:
        # Those whose wait was cancelled take themselves out only when they run again.
        return [name for name, given in self._waiting.items() if not given.done()]

    def _first(self, names: list[str]) -> str | None:
        ranks = {name: rank for rank, name in enumerate(self._order)}
        return min(names, key=lambda name: ranks.get(name, len(ranks)), default=None)
