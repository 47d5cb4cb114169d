"""TTFT against load, and the load that a system carries: shared by Tetris's figures 8 to 10.

The paper scales latencies to 25 times that under light load and calls the largest load that stays
low a system's critical rate, without saying how low. Here a system carries a rate when its P50 and
its P99 are both within 25 times the best system's under light load; the search continues until a
carried rate and a rate not carried are within 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace.core.config import SchedulerConfig
from millrace.experiments.outcome import Announce
from millrace.experiments.tetris.common import (
    LIMIT_X,
    Point,
    Size,
    Testbed,
    point,
    scenario,
)
from millrace.sim.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points by ascending rate, and the largest rate carried; 0 when not even the first is."""

    points: Sequence[Point]
    capacity_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """Curves by system, and the latencies that limit them."""

    curves: Mapping[str, Curve]
    light_p50_s: float
    light_p99_s: float

    def best(self, names: Sequence[str]) -> str:
        """Returns the system of these that carries most."""
        return max(names, key=lambda name: self.curves[name].capacity_rps)


def load_test(
    testbed: Testbed,
    trace: str,
    configs: Mapping[str, SchedulerConfig],
    *,
    size: Size,
    announce: Announce,
) -> LoadTest:
    """Runs every system at rising rates until a rate is not carried, then searches the edge."""
    step_rps = testbed.steps_rps[trace] * size.stride
    runs = {name: scenario(testbed, trace, config) for name, config in configs.items()}
    light = {name: point(of, testbed.steps_rps[trace] / 10, size) for name, of in runs.items()}
    p50_s = min(point.p50_s for point in light.values())
    p99_s = min(point.p99_s for point in light.values())

    def carried(found: Point) -> bool:
        return found.p50_s <= LIMIT_X * p50_s and found.p99_s <= LIMIT_X * p99_s

    curves = {}
    for name, of in runs.items():
        announce(f"{testbed.name}, {trace}: {name}")
        points = [light[name]]
        points += _rising(of, step_rps, size, carried)
        edge = max((found.rate_rps for found in points if carried(found)), default=0.0)
        points.sort(key=lambda found: found.rate_rps)
        curves[name] = Curve(points=points, capacity_rps=edge)
    return LoadTest(curves=curves, light_p50_s=p50_s, light_p99_s=p99_s)


def _rising(
    of: Scenario, step_rps: float, size: Size, carried: Callable[[Point], bool]
) -> list[Point]:
    points: list[Point] = []
    low_rps, rate_rps = 0.0, step_rps
    while not points or carried(points[-1]):
        points.append(point(of, round(rate_rps, 6), size))
        low_rps, rate_rps = rate_rps - step_rps, rate_rps + step_rps
    high_rps = low_rps + step_rps
    low_rps = max(low_rps, step_rps / 10)
    while high_rps > low_rps * (1 + size.tolerance):
        found = point(of, math.sqrt(low_rps * high_rps), size)
        points.append(found)
        if carried(found):
            low_rps = found.rate_rps
        else:
            high_rps = found.rate_rps
    return points
