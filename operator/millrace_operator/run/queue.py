"""The level-triggered work queue: which objects to reconcile, when, and never twice at once.

A touch says that an object may have changed, not how. Touches before a pass, or during it, count as
one touch. `reconcile` returns when it wants the next pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from millrace.core.backoff import Backoff
from millrace.core.errors import MillraceError
from millrace_operator.run.kube import KubeError

log = logging.getLogger(__name__)

#: Without a spread of its own: `Pace.jitter` spreads all waits.
RETRY = Backoff(0.5, 60.0, spread=0.0)


class Key(NamedTuple):
    """Names one object."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Waiting times in seconds. Each wait varies by up to `jitter` of itself, to spread the
    load.
    """

    gap_s: float = 0.5  # least time between two passes over an object
    retry: Backoff = RETRY
    #: An event cuts a longer wait after a failure to this: it may report that the cause is
    #: repaired.
    event_retry_s: float = 5.0
    jitter: float = 0.2


@dataclass(slots=True, eq=False)
class _Entry:
    """The queue's state of an object."""

    due_s: float | None = None  # None: nothing to do
    running: bool = False
    not_before_s: float = 0.0
    failures: int = 0


class WorkQueue:
    """Runs `reconcile(key)` for at most `workers` keys at a time, and once at a time per key.

    `reconcile` returns the seconds until its next pass; None forgets the key. An exception is
    logged and retried after growing waits; KubeError.retry_after_s is respected.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 16,
        pace: Pace | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._reconcile = reconcile
        self._workers = asyncio.Semaphore(workers)
        self._pace = pace or Pace()
        self._spread = spread
        self._entries: dict[Key, _Entry] = {}
        self._changed = asyncio.Event()

    def touch(self, key: Key) -> None:
        """Schedules a pass over the object soon."""
        entry = self._entries.setdefault(key, _Entry())
        self._wake(entry, max(_now(), entry.not_before_s))

    def waiting(self) -> int:
        """Returns the number of objects that are due."""
        now_s = _now()
        return sum(e.due_s is not None and e.due_s <= now_s for e in self._entries.values())

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._workers.acquire()
                key, entry = await self._next_due()
                entry.due_s, entry.running = None, True
                group.create_task(self._look(key, entry))

    def _wake(self, entry: _Entry, at_s: float) -> None:
        if entry.due_s is None or at_s < entry.due_s:
            entry.due_s = at_s
            self._changed.set()

    async def _next_due(self) -> tuple[Key, _Entry]:
        while True:
            self._changed.clear()
            due_s, key = min(
                (
                    (entry.due_s, key)
                    for key, entry in self._entries.items()
                    if entry.due_s is not None and not entry.running
                ),
                default=(math.inf, None),
            )
            if key is not None and due_s <= _now():
                return key, self._entries[key]
            wait_s = None if key is None else due_s - _now()
            with contextlib.suppress(TimeoutError):  # an object is due
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _look(self, key: Key, entry: _Entry) -> None:
        try:
            again_s = await self._reconcile(key)
        except Exception as error:  # one object's error must not end the work on others
            entry.failures += 1
            again_s, floor_s = self._retry_s(entry.failures, error)
            entry.not_before_s = _now() + floor_s
            _report(key, error, again_s)
        else:
            entry.failures = 0
            entry.not_before_s = _now() + self._pace.gap_s
        finally:
            entry.running = False
            self._workers.release()
            self._changed.set()
        if entry.due_s is not None:  # touched during the pass
            entry.due_s = max(entry.due_s, entry.not_before_s)
        if again_s is not None:
            spread = 1.0 + self._pace.jitter * self._spread()
            self._wake(entry, _now() + max(again_s * spread, self._pace.gap_s))
        elif entry.due_s is None:
            del self._entries[key]

    def _retry_s(self, failures: int, error: Exception) -> tuple[float, float]:
        """Returns the seconds until the next attempt, and those before which no event can bring it
        forward.
        """
        pace = self._pace
        wait_s = pace.retry.pause_s(failures - 1)
        asked_s = error.retry_after_s if isinstance(error, KubeError) else 0.0
        return max(wait_s, asked_s), max(min(wait_s, pace.event_retry_s), asked_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _report(key: Key, error: Exception, again_s: float) -> None:
    where = "/".join(key)
    if isinstance(error, MillraceError):
        log.warning("%s: %s; next try in %.1f s", where, error, again_s)
    else:
        log.error("%s: next try in %.1f s", where, again_s, exc_info=error)
