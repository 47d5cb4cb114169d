"""The improvement rate by load: Tetris section 5.1 (real-time load-aware rate), 6 and 7.1.

A larger SP degree must cut a request's TTFT by more than this share (Algorithm 2, line 13). The
best share depends on how often requests arrive: simulation finds it for a range of arrival rates,
and the live scheduler uses the recorded rate nearest to the observed rate.

Deviation: such a table holds for the lengths and the pool that it was found for. Without a table,
`BY_LOAD` is looked up by the prefill work that arrives, in seconds per second and instance: by that
measure the six tables of Figures 11 and 12 that `millrace sim` found (8B and 70B, three mixes,
experiments/tetris/rates.json) nearly agree, and `BY_LOAD` is their middle.

Ours, too: with `BY_LOAD` a request that would miss its objective takes a larger group for a smaller
gain, if that keeps the objective (`fleet.pool.Pool.plan`).

Ours where the paper gives no figure: the window is 60 s long, and in the first 60 s the observed
rate is the rate since the first arrival. At equal distance the lower rate's entry counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from millrace.core.errors import ConfigError

WINDOW_S = 60.0
REFRESH_S = 30.0
#: Used until an arrival rate has been looked up: the middle of what Figures 11 and 12 try.
STARTING_RATE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementRates:
    """Rows of (arrivals per second or load, best improvement rate), the former ascending.

    Raises ConfigError without rows, for arrivals that don't ascend from 0 or more, and for
    improvement rates outside 0 to 1.
    """

    rows: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError("improvement_rates.rows is empty; it needs a row at least")
        before = -1.0
        for arrivals_rps, rate in self.rows:
            if not (arrivals_rps >= 0.0 and arrivals_rps > before):
                raise ConfigError(
                    f"improvement_rates.rows has {arrivals_rps} arrivals/s after {before}; "
                    "they must ascend from 0 or more"
                )
            if not 0.0 <= rate <= 1.0:
                raise ConfigError(
                    f"improvement_rates.rows has the rate {rate}; it must be between 0 and 1"
                )
            before = arrivals_rps

    def at(self, arrivals_rps: float) -> float:
        """Returns the improvement rate recorded nearest to this many arrivals per second."""
        after = bisect_left(self.rows, arrivals_rps, key=itemgetter(0))
        near = self.rows[max(0, after - 1) : after + 1]
        return min(near, key=lambda row: abs(row[0] - arrivals_rps))[1]


#: Rows by load instead of arrivals: see above.
BY_LOAD = ImprovementRates(
    rows=(
        (0.1, 0.05),
        (0.2, 0.15),
        (0.35, 0.2),
        (0.5, 0.25),
        (0.7, 0.35),
        (0.8, 0.5),
        (0.95, 0.6),
        (1.1, 0.7),
    )
)


def parse_rates(text: str) -> ImprovementRates:
    """Reads ARRIVALS_PER_S:RATE,... as `format_rates` writes it. Raises ConfigError."""
    try:
        pairs = [row.split(":") for row in text.split(",")]
        rows = tuple((float(arrivals_rps), float(rate)) for arrivals_rps, rate in pairs)
    except ValueError:
        raise ConfigError(
            f"improvement_rates is {text!r}; write it as ARRIVALS_PER_S:RATE,..."
        ) from None
    return ImprovementRates(rows=rows)


def format_rates(rates: ImprovementRates) -> str:
    """Returns one line of text, as settings hold it."""
    return ",".join(f"{arrivals_rps:g}:{rate:g}" for arrivals_rps, rate in rates.rows)


class RateWindow:
    """The arrivals of the last `window_s` seconds, and their work. Times never run backwards."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        if not window_s > 0.0:
            raise ConfigError(f"window_s is {window_s}; it must be above 0")
        self._window_s = window_s
        self._arrivals: deque[tuple[float, float]] = deque()  # when, and seconds of work
        self._first_s: float | None = None

    def arrived(self, now_s: float, work_s: float = 0.0) -> None:
        """Notes an arrival.

        work_s: seconds of its prefill, divided by the instances that share it.
        """
        if self._first_s is None:
            self._first_s = now_s
        self._arrivals.append((now_s, work_s))
        self._forget(now_s)

    def rate_rps(self, now_s: float) -> float:
        """Returns arrivals per second; 0 until some time has passed since the first arrival."""
        span_s = self._span_s(now_s)
        return len(self._arrivals) / span_s if span_s > 0.0 else 0.0

    def load(self, now_s: float) -> float:
        """Returns the work that arrives, in seconds per second; 0 until some time has passed."""
        span_s = self._span_s(now_s)
        return sum(work_s for _, work_s in self._arrivals) / span_s if span_s > 0.0 else 0.0

    def _span_s(self, now_s: float) -> float:
        self._forget(now_s)
        if self._first_s is None:
            return self._window_s
        return min(self._window_s, now_s - self._first_s)

    def _forget(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_s - self._window_s:
            self._arrivals.popleft()


class LiveImprovementRate:
    """The rate to plan with now: looked up every `refresh_s`, unless set by hand.

    rates: by arrivals per second; None: `BY_LOAD`.
    """

    def __init__(
        self,
        rates: ImprovementRates | None,
        *,
        window_s: float = WINDOW_S,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._rates = rates
        self._window = RateWindow(window_s)
        self._refresh_s = refresh_s
        self._next_s: float | None = None
        self._found = STARTING_RATE
        self._by_hand: float | None = None

    @property
    def source(self) -> str:
        """Returns where the rate comes from, for people."""
        if self._by_hand is not None:
            return "fixed"
        return "by load" if self._rates is None else "by arrivals"

    @property
    def by_value(self) -> bool:
        """Returns whether a request that would be late may take a larger group all the same: not
        where a rate or a table is set.
        """
        return self._by_hand is None and self._rates is None

    def arrived(self, now_s: float, work_s: float = 0.0) -> None:
        """Notes an arrival, with its work as in `RateWindow`.

        The first look-up comes `refresh_s` after the first request.
        """
        if self._next_s is None:
            self._next_s = now_s + self._refresh_s
        self._window.arrived(now_s, work_s)

    def at(self, now_s: float) -> float:
        """Returns the improvement rate to plan with."""
        if self._next_s is not None and now_s >= self._next_s:
            if self._rates is None:
                self._found = BY_LOAD.at(self._window.load(now_s))
            else:
                self._found = self._rates.at(self._window.rate_rps(now_s))
            self._next_s = now_s + self._refresh_s
        return self._found if self._by_hand is None else self._by_hand

    def set_by_hand(self, rate: float | None) -> None:
        """Fixes the rate; None returns to the table. Raises ConfigError outside 0 to 1."""
        if rate is not None and not 0.0 <= rate <= 1.0:
            raise ConfigError(f"improvement_rate is {rate}; it must be between 0 and 1")
        self._by_hand = rate

    def replace_table(self, rows: Iterable[tuple[float, float]]) -> None:
        """Sets a new table, for a new distribution of lengths; looked up at the next `at`."""
        self._rates = ImprovementRates(rows=tuple(rows))
        if self._next_s is not None:
            self._next_s = float("-inf")


def live_rate(rate: float, table: str) -> LiveImprovementRate:
    """Builds the rate from settings: `rate`, or, if it is below 0, the `table` by arrivals, if
    any."""
    live = LiveImprovementRate(parse_rates(table) if table else None)
    live.set_by_hand(rate if rate >= 0.0 else None)
    return live
