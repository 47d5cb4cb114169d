"""Quantiles of a long stream of values in little memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Buckets are this factor wide; a quantile is the middle of its bucket, so within 1 % of the value.
_WIDTH = math.log(1.02)
_LEAST = 1e-9  # smaller values, and zero, count as zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A summary; quantiles by nearest rank, to within 1 %. All zero when empty."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Histogram:
    """Counts of values >= 0 in logarithmic buckets. Memory does not grow with their number."""

    __slots__ = ("_buckets", "_zeros", "count", "max", "min", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = 0.0
        self._zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        if value < self.min:
            self.min = value
        if value < _LEAST:
            self._zeros += 1
            return
        bucket = math.floor(math.log(value) / _WIDTH)
        buckets = self._buckets
        buckets[bucket] = buckets.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        """Counts everything that `other` counts."""
        self.count += other.count
        self.total += other.total
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        self._zeros += other._zeros
        for bucket, number in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + number

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Returns, for each share, ascending in 0..1, the least value which that share does not
        exceed.
        """
        found: list[float] = []
        if not self.count:
            return [0.0 for _ in shares]
        steps = iter([(0.0, self._zeros), *self._counts()])
        value, seen = next(steps)
        for share in shares:
            rank = max(1, math.ceil(share * self.count - 1e-9))
            while seen < rank:
                value, number = next(steps)
                seen += number
            found.append(min(max(value, self.min), self.max))
        return found

    def _counts(self) -> list[tuple[float, int]]:
        return [
            (math.exp((bucket + 0.5) * _WIDTH), number)
            for bucket, number in sorted(self._buckets.items())
        ]

    def distribution(self) -> Distribution:
        p50, p90, p99 = self.quantiles((0.5, 0.9, 0.99))
        return Distribution(
            count=self.count,
            mean=self.total / self.count if self.count else 0.0,
            p50=p50,
            p90=p90,
            p99=p99,
            max=self.max,
        )
