"""Variants of Tetris against Tetris itself, by load: shared by figures 11 to 13."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.experiments.outcome import Announce
from millrace.experiments.tetris.common import (
    TETRIS,
    Point,
    Size,
    Testbed,
    point,
    scenario,
    shipped_rates,
    systems,
)
from millrace.sim.results.plots import Panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """Points of Tetris and of each variant at the same rates, ascending."""

    tetris: tuple[Point, ...]
    variants: Mapping[str, tuple[Point, ...]]

    def slowdowns(self, name: str, which: str) -> list[tuple[float, float]]:
        """Returns (rate, a variant's TTFT over Tetris's); `which` is p50, p99 or mean."""
        pairs = zip(self.variants[name], self.tetris, strict=True)
        return [
            (own.rate_rps, getattr(other, f"{which}_s") / getattr(own, f"{which}_s"))
            for other, own in pairs
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def panel(self, title: str, which: str) -> Panel:
        """Charts slowdown by load."""
        return Panel(
            f"{title}: {which}",
            "requests/s",
            "TTFT / Tetris",
            {name: self.slowdowns(name, which) for name in self.variants},
            mark=1.0,
        )


def ablation(
    key: str,
    testbed: Testbed,
    trace: str,
    variants: Mapping[str, SchedulerConfig],
    *,
    size: Size,
    announce: Announce,
) -> Ablation:
    """Runs all variants at every rate of the shipped table, up to saturation."""
    rates_rps = [
        arrivals_rps for arrivals_rps, _ in shipped_rates()[key][trace].rows[:: size.stride]
    ]

    def points(name: str, config: SchedulerConfig) -> Iterator[Point]:
        of = scenario(testbed, trace, config)
        for rate_rps in rates_rps:
            announce(f"{testbed.name}, {trace}: {name} at {rate_rps:g}/s")
            yield point(of, rate_rps, size)

    return Ablation(
        tetris=tuple(points(TETRIS, systems(testbed, trace)[TETRIS])),
        variants={name: tuple(points(name, config)) for name, config in variants.items()},
    )
