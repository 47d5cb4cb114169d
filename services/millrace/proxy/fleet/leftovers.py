"""Removes from a store what refused requests have left there, so that their ids are free again.

A write whose answer did not come may have been made, or may be made when the network heals. So what
it would leave is removed as soon as the store answers, and looked for again for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from millrace.concurrency import cancel
from millrace.core.backoff import Backoff
from millrace.state.store import IdTaken, StoreError

#: Removes what one request left, and nothing of another of its id. Returns False if nothing is
#: there; raises StoreError.
Remove = Callable[[], Awaitable[bool]]

#: How long it is looked for, from the store's first answer on.
LATE_S = 60.0
PAUSES = Backoff(0.2, 20.0)
#: Before that. Meanwhile another replica says that the id is taken.
AWAY_PAUSES = Backoff(0.2, 5.0)
#: Between attempts to take an id that refused requests may have left taken.
CREATE_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)
#: What more requests leave stays in the store until it expires.
MOST = 4096


class Leftovers:
    """What refused requests may have left in one store, by id."""

    def __init__(self) -> None:
        self._known: dict[str, set[Remove]] = {}  # a client may have been refused more than once
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str, remove: Remove) -> None:
        """Removes what is left of an id, in the background."""
        if len(self._tasks) >= MOST:
            return
        self._known.setdefault(name, set()).add(remove)
        task = asyncio.create_task(self._remove(name, remove))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def create(self, name: str, create: Callable[[], Awaitable[None]]) -> None:
        """Makes a call that takes an id; again, if refused requests may have left the id taken. A
        store that was silent may make the write of one after the removal of another's.

        Raises IdTaken, StoreError.
        """
        for pause_s in CREATE_PAUSES_S:
            left = name in self._known  # what took the id may be gone before this task hears of it
            try:
                await create()
            except IdTaken:
                if not left and name not in self._known:
                    raise
            else:
                return
            await asyncio.gather(*(remove() for remove in self._known.get(name, ())))
            await asyncio.sleep(pause_s)
        await create()

    async def close(self, timeout_s: float) -> None:
        """Looks for all of it once more, for `timeout_s` at most."""
        await cancel(*self._tasks)
        last = [asyncio.ensure_future(one()) for known in self._known.values() for one in known]
        if last:
            await asyncio.wait(last, timeout=timeout_s)
        await cancel(*last)

    async def _remove(self, name: str, remove: Remove) -> None:
        answered_s: float | None = None  # since when the store says that nothing is there
        looks, pauses = 0, AWAY_PAUSES
        while answered_s is None or time.monotonic() - answered_s <= LATE_S:
            with contextlib.suppress(StoreError):
                if await remove():
                    break
                if answered_s is None:
                    answered_s, looks, pauses = time.monotonic(), 0, PAUSES
            await asyncio.sleep(pauses.pause_s(looks))
            looks += 1
        of_name = self._known[name]
        of_name.discard(remove)
        if not of_name:
            del self._known[name]
