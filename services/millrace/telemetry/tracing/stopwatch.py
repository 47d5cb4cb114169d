"""Seconds since a request's arrival, which the proxy read from its wall clock."""

from __future__ import annotations

import math
import time
from typing import Final

#: Two clocks read within this time agree well enough; else both are read again, a few times.
_SOON_S: Final = 5e-5
_MOST_READS: Final = 16


class Stopwatch:
    """A clock that counts seconds since a request's arrival at the proxy.

    It reads the wall clock once, when it is made, and goes on by time.monotonic: a later step of
    the wall clock changes nothing. Where the proxy's wall clock is ahead, the count begins at 0.
    Where it is behind, so much is added.
    """

    __slots__ = ("arrival_s",)

    def __init__(self, arrival_unix_s: float) -> None:
        now_s, unix_s = _both_clocks()
        #: The arrival, by time.monotonic.
        self.arrival_s = now_s - max(0.0, unix_s - arrival_unix_s)

    def now_s(self) -> float:
        return time.monotonic() - self.arrival_s

    def at_monotonic_s(self, monotonic_s: float) -> float:
        """Converts a time of time.monotonic."""
        return monotonic_s - self.arrival_s


def _both_clocks() -> tuple[float, float]:
    """Returns time.monotonic and the Unix time of one moment.

    Other threads and processes may run for milliseconds between two reads of clocks: the quickest
    of a few pairs counts.
    """
    best_s, found = math.inf, (0.0, 0.0)
    for _ in range(_MOST_READS):
        before_s, unix_s = time.monotonic(), time.time()
        took_s = time.monotonic() - before_s
        if took_s < best_s:
            best_s, found = took_s, (before_s, unix_s)
        if took_s <= _SOON_S:
            break
    return found
