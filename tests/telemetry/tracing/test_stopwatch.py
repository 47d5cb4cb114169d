"""The clock that counts from a request's arrival."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from millrace.telemetry.tracing.stopwatch import Stopwatch

HOUR_S = 3600.0


class Clocks:
    """A monotonic clock and a wall clock; `stalls_s` are the times between their next reads."""

    def __init__(self, stalls_s: Sequence[float] = ()) -> None:
        self._stalls_s = iter(stalls_s)
        self.now_s = 100.0
        self.unix_zero_s = 1_700_000_000.0

    def monotonic(self) -> float:
        self.now_s += next(self._stalls_s, 0.0)
        return self.now_s

    def time(self) -> float:
        return self.unix_zero_s + self.monotonic()

    def given_to(self, patched: pytest.MonkeyPatch) -> None:
        patched.setattr(time, "monotonic", self.monotonic)
        patched.setattr(time, "time", self.time)


@pytest.mark.parametrize("stalls_s", [(), (0.0, 0.2), (0.0, 0.0, 0.2), (0.0, 0.2) * 3])
def test_a_stall_between_two_clocks_moves_no_span(
    stalls_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        Clocks(stalls_s).given_to(patched)
        at_s = Stopwatch(1_700_000_090.0).at_monotonic_s(95.0)
    assert at_s == pytest.approx(5.0, abs=1e-3)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_wall_clock_changes_no_duration(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    with monkeypatch.context() as patched:
        clocks.given_to(patched)
        watch = Stopwatch(1_700_000_098.0)
        clocks.unix_zero_s += step_s
        clocks.now_s += 3.0
        found = watch.now_s(), watch.at_monotonic_s(101.0), watch.arrival_s
    assert found == pytest.approx((5.0, 3.0, 98.0))


def test_a_proxy_whose_clock_is_ahead_sends_no_request_of_the_future(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks()
    with monkeypatch.context() as patched:
        clocks.given_to(patched)
        watch = Stopwatch(1_700_000_100.0 + HOUR_S)
        clocks.now_s += 3.0
        assert watch.now_s() == pytest.approx(3.0)
