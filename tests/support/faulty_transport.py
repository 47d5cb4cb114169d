"""A transport over a real one that drops, repeats, reorders, delays, corrupts and truncates.

A fault is chosen by a seed, so a failing run repeats. The caller is told nothing: its future ends
as if all had gone well, but never before the bytes of a late write lie there.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.over import TransportOver
from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs

FAULTS = ("drop", "duplicate", "reorder", "delay", "corrupt", "truncate")
#: Calls that pass a delayed call before it goes.
DELAY_CALLS = 5


class FaultyTransport(TransportOver):
    """Passes all calls to `inner`; every write and notification meets a fault of `faults` with
    `probability`. `most`: the most faults in all, so that a retry may succeed.
    """

    def __init__(
        self,
        inner: Transport,
        seed: int,
        *,
        faults: Sequence[str] = FAULTS,
        probability: float = 0.1,
        most: int = 1 << 30,
        on_writes: bool = True,
        on_notifications: bool = True,
    ) -> None:
        super().__init__(inner)
        self.seen: Counter[str] = Counter()
        self.probability = probability
        self._rng = random.Random(seed)
        self._faults = faults
        self._most = most
        self._on_writes, self._on_notifications = on_writes, on_notifications
        self._memories: list[Memory] = []
        self._held: list[tuple[int, Callable[[], None]]] = []
        self._scratch: list[np.ndarray] = []  # alive while writes read them
        self._lock = threading.RLock()

    def register(self, memory: Memory) -> int:
        with self._lock:
            self._memories.append(memory)
            return super().register(memory)

    def close(self) -> None:
        with self._lock:
            self._held.clear()
        super().close()

    # -- with faults

    def write(
        self,
        peer: str,
        runs: Runs,
        notification: bytes,
        *,
        region: int = 0,
        peer_region: int = 0,
        urgent: bool = False,
    ) -> Future[None]:
        def go(runs: Runs = runs, notification: bytes = notification, source: int = region):
            return self.inner.write(
                peer, runs, notification, region=source, peer_region=peer_region, urgent=urgent
            )

        with self._lock:
            fault = self._next(self._on_writes)
            if fault == "corrupt":
                flipped, scratch = self._corrupted(runs, region)
                return self._passed(go(flipped, notification, scratch))
            if fault == "truncate":
                return self._passed(go(self._cut(runs)))
            return self._met(fault, go)

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        def go(payload: bytes = payload):
            return self.inner.notify(peer, payload, urgent=urgent)

        with self._lock:
            fault = self._next(self._on_notifications)
            if fault == "corrupt":
                at = self._rng.randrange(1, len(payload))
                bit = 1 << self._rng.randrange(8)
                return go(payload[:at] + bytes([payload[at] ^ bit]) + payload[at + 1 :])
            if fault == "truncate":
                return go(payload[: self._rng.randrange(1, len(payload))])
            return self._met(fault, go)

    def release(self) -> None:
        """Lets everything go that is held back."""
        with self._lock:
            held, self._held = self._held, []
            for _, go in held:
                go()

    # -- inside

    def _next(self, eligible: bool) -> str:
        if not eligible or self.seen.total() >= self._most:
            return ""
        if self._rng.random() >= self.probability:
            return ""
        fault = self._rng.choice(self._faults)
        self.seen[fault] += 1
        return fault

    def _met(self, fault: str, go: Callable[[], Future[None]]) -> Future[None]:
        if fault == "drop":
            return _done()
        if fault in ("reorder", "delay"):
            late: Future[None] = Future()
            late.set_running_or_notify_cancel()
            self._held.append((1 if fault == "reorder" else DELAY_CALLS, _then(go, late)))
            return late
        posted = go()
        if fault == "duplicate":
            go()
        return self._passed(posted)

    def _passed(self, posted: Future[None]) -> Future[None]:
        """Lets the calls go that this call has passed."""
        held, self._held = self._held, []
        for left, go in held:
            if left > 1:
                self._held.append((left - 1, go))
            else:
                go()
        return posted

    def _corrupted(self, runs: Runs, region: int) -> tuple[Runs, int]:
        """Returns the runs of a copy of their bytes, with one bit changed, and its region."""
        copy = np.empty(runs.total_bytes, dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(runs.length)[:-1]))
        memory = Memory.of_array(copy)
        copy_on_host(self._memories[region], memory, Runs(runs.source, starts, runs.length))
        copy[self._rng.randrange(len(copy))] ^= 1 << self._rng.randrange(8)
        self._scratch.append(copy)
        return Runs(starts, runs.target, runs.length), self.register(memory)

    def _cut(self, runs: Runs) -> Runs:
        """Drops the end of the last run."""
        length = runs.length.copy()
        length[-1] -= self._rng.randrange(1, int(length[-1]))
        return Runs(runs.source, runs.target, length)


def _then(go: Callable[[], Future[None]], late: Future[None]) -> Callable[[], None]:
    def ended(posted: Future[None]) -> None:
        if (error := posted.exception()) is not None:
            late.set_exception(error)
        else:
            late.set_result(None)

    return lambda: go().add_done_callback(ended)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
