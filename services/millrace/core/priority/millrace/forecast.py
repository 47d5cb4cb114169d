"""The work that is yet to come and has to go before what is present, as the last arrivals tell.

Of an arrival with objective s and work w, that part of the stream which arrives within d - s
seconds has its deadline before d. Work that comes at a rate r with such objectives adds
r max(0, d - s) until d. Only requests that would not be given up for the ones present count: those
of at most their density (work per value).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Final

#: Arrivals that the forecast is made of: each weighs 1 - 1/WINDOW of the next one.
WINDOW: Final = 400
#: Arrivals between two evaluations of the sums.
REFRESH: Final = 16
_BINS_PER_OCTAVE: Final = 2
_LEAST: Final = 1e-6
_HIGHEST_SCALE: Final = 1e9

#: The rates of w and of w s of all arrivals up to a density, up to each objective.
Row = list[tuple[float, float]]
_NOTHING: Row = [(0.0, 0.0)]


class Forecast:
    """Expected work by deadline and density."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # (density, objective): w and w s
        self._scale = 1.0  # of the newest arrival: sums don't have to be decayed one by one
        self._span_s = 0.0
        self._last_s = -math.inf
        self._arrivals = 0
        self._log_objective = 0.0  # the mean of the last ones
        self._objectives: list[float] = []  # the bins that have arrivals, by their lower ends
        self._densities: list[float] = []
        self._sums: list[tuple[list[float], list[float]]] = []  # by density: of w and w s, by bin
        self._rows: dict[int, Row] = {}  # those that were asked for

    def arrived(self, at_s: float, work: float, objective_s: float, density: float) -> None:
        """Notes an arrival: `work` in seconds times instances."""
        gap_s = max(0.0, at_s - self._last_s) if self._arrivals else 0.0
        self._last_s = max(self._last_s, at_s)
        self._scale /= 1.0 - 1.0 / WINDOW
        self._span_s += gap_s * self._scale
        cell = self._cells.setdefault((_bin(density), _bin(objective_s)), [0.0, 0.0])
        cell[0] += work * self._scale
        cell[1] += work * objective_s * self._scale
        self._arrivals += 1
        log_s = math.log(max(objective_s, _LEAST))
        self._log_objective += max(1 / self._arrivals, 1 / WINDOW) * (log_s - self._log_objective)
        if self._arrivals % REFRESH == 0:
            self._sum_up()

    def _sum_up(self) -> None:
        if self._span_s <= 0.0:
            return
        objectives = sorted({objective for _, objective in self._cells})
        densities = sorted({density for density, _ in self._cells})
        places = {number: index for index, number in enumerate(objectives)}
        by_density: dict[int, list[tuple[int, list[float]]]] = {one: [] for one in densities}
        for (density, objective), cell in self._cells.items():
            by_density[density].append((places[objective], cell))
        works, weighted = [0.0] * len(objectives), [0.0] * len(objectives)
        self._sums, self._rows = [], {}
        factor = 1.0 / self._span_s
        for density in densities:
            for index, (work, work_s) in by_density[density]:
                works[index] += factor * work
                weighted[index] += factor * work_s
            self._sums.append((works[:], weighted[:]))
        self._objectives = [_lower_end(number) for number in objectives]
        self._densities = [_lower_end(number) for number in densities]
        if self._scale > _HIGHEST_SCALE:
            for cell in self._cells.values():
                cell[0] /= self._scale
                cell[1] /= self._scale
            self._span_s /= self._scale
            self._scale = 1.0

    @property
    def usual_objective_s(self) -> float:
        """Returns the geometric mean of the last objectives; 0 before the first."""
        return math.exp(self._log_objective) if self._arrivals else 0.0

    def row(self, density: float) -> Row:
        """Returns the expected arrivals of at most this density."""
        index = bisect_right(self._densities, density)
        if not index:
            return _NOTHING
        row = self._rows.get(index)
        if row is None:
            works, weighted = self._sums[index - 1]
            sums = accumulate(works, initial=0.0), accumulate(weighted, initial=0.0)
            row = self._rows[index] = list(zip(*sums, strict=True))
        return row

    def work(self, row: Row, until_s: float) -> float:
        """Returns the work to come with a deadline in the next `until_s` seconds.

        Beyond half of the time that the forecast has seen, it expects nothing more.
        """
        seen_s = 0.5 * self._span_s / self._scale
        if until_s > seen_s:
            until_s = seen_s
        last = min(bisect_right(self._objectives, until_s), len(row) - 1)
        rate, weighted = row[last]
        return max(0.0, rate * until_s - weighted)


def _bin(value: float) -> int:
    return math.floor(_BINS_PER_OCTAVE * math.log2(max(value, _LEAST)))


def _lower_end(number: int) -> float:
    return math.pow(2.0, number / _BINS_PER_OCTAVE)
