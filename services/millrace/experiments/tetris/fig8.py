"""Tetris figure 8: TTFT against load, and the load that Tetris carries beyond its baselines."""

from __future__ import annotations

from dataclasses import asdict

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.common import (
    ASSUMPTIONS,
    FULL,
    LIMIT_X,
    QUICK,
    SINGLE_CHUNK,
    TETRIS,
    Point,
    cases,
    systems,
)
from millrace.experiments.tetris.load import LoadTest, load_test
from millrace.sim.results.plots import Panel

_GAIN = {"8b": "20-45 %", "70b": "21-43 %"}


def measure(quick: bool, announce: Announce) -> Outcome:
    """Curves and edges of Tetris and its baselines on every testbed and trace."""
    found: dict[str, dict[str, LoadTest]] = {}
    size = QUICK if quick else FULL
    for key, testbed, trace in cases(quick):
        configs = systems(testbed, trace)
        del configs[SINGLE_CHUNK]
        test = load_test(testbed, trace, configs, size=size, announce=announce)
        found.setdefault(key, {})[trace] = test
    return Outcome(
        title="Tetris figure 8: TTFT against load",
        assumptions=(
            *ASSUMPTIONS,
            f"carried: P50 and P99 within {LIMIT_X:g}x those of the best system under light load",
        ),
        findings=[
            finding
            for key, by in found.items()
            for t, test in by.items()
            for finding in _findings(key, t, test)
        ],
        results={
            key: {trace: asdict(test) for trace, test in by.items()} for key, by in found.items()
        },
        panels=[
            [_panel(f"{key}, {trace}", test, which) for trace, test in by.items()]
            for key, by in found.items()
            for which in ("p50", "p99")
        ],
    )


def _findings(key: str, trace: str, test: LoadTest) -> list[Finding]:
    where = f"{key}, {trace}"
    baselines = [name for name in test.curves if name != TETRIS]
    best = test.best(baselines)
    gain = test.curves[TETRIS].capacity_rps / test.curves[best].capacity_rps - 1
    carried = [
        Finding(f"{where}: {name} carries (1/s)", "", f"{curve.capacity_rps:.2f}")
        for name, curve in test.curves.items()
    ]
    return [
        *carried,
        Finding(f"{where}: Tetris over {best}", _GAIN[key], f"{gain:.0%}"),
    ]


def _panel(title: str, test: LoadTest, which: str) -> Panel:
    light_s = test.light_p50_s if which == "p50" else test.light_p99_s

    def scaled(found: Point) -> float:
        return (found.p50_s if which == "p50" else found.p99_s) / (LIMIT_X * light_s)

    return Panel(
        f"{title}: {which.upper()}",
        "requests/s",
        f"TTFT / {LIMIT_X:g}x light load",
        {
            name: [(p.rate_rps, scaled(p)) for p in curve.points if scaled(p) < 2.0]
            for name, curve in test.curves.items()
        },
        mark=1.0,
    )
