"""Simulated time: one heap of callbacks by time, in a fixed order among equals."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Runs callbacks in order of their time; callbacks of one time in the order they were set.

    Nothing is ever taken off the heap: a callback that came too late must notice it.
    """

    __slots__ = ("_heap", "_set", "now_s", "ran")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran = 0  # callbacks so far
        self._set = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, callback: Callable[[Any], None], argument: object = None) -> None:
        """Sets a call of `callback(argument)` at `time_s`, or now if that is past."""
        self._set += 1
        now_s = self.now_s
        heappush(self._heap, (time_s if time_s > now_s else now_s, self._set, callback, argument))

    @property
    def next_s(self) -> float | None:
        """Returns the time of the next callback; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        """Moves time to the next callback and runs it. There must be one."""
        self.now_s, _, callback, argument = heappop(self._heap)
        self.ran += 1
        callback(argument)
