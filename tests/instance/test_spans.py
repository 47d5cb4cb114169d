"""Times of spans, on the clock that counts from a request's arrival."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from millrace.instance.spans import Stopwatch


class StalledClocks:
    """A monotonic clock and a wall clock; `stalls_s` are the times between their next reads."""

    def __init__(self, stalls_s: Iterator[float]) -> None:
        self._stalls_s = stalls_s
        self._now_s = 100.0

    def monotonic(self) -> float:
        self._now_s += next(self._stalls_s, 0.0)
        return self._now_s

    def time(self) -> float:
        return 1_700_000_000.0 + self.monotonic()


@pytest.mark.parametrize("stalls_s", [(), (0.0, 0.2), (0.0, 0.0, 0.2), (0.0, 0.2) * 3])
def test_a_stall_between_two_clocks_moves_no_span(
    stalls_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = StalledClocks(iter(stalls_s))
    clock = Stopwatch(1_700_000_090.0)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", clocks.monotonic)
        patched.setattr(time, "time", clocks.time)
        at_s = clock.at_monotonic_s(95.0)
    assert at_s == pytest.approx(5.0, abs=1e-3)
