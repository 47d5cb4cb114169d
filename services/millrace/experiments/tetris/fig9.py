"""Tetris figures 9 and 10: TTFT at the critical load of the best baseline, throughput at its own.

Critical: the largest load that a system carries (`tetris_load`). The paper does not say how low
latency is there, and the ratio grows steeply towards it, so 80 and 90 % of it are shown too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.common import (
    ASSUMPTIONS,
    FULL,
    QUICK,
    SINGLE_CHUNK,
    TETRIS,
    cases,
    loaded,
    scenario,
    systems,
)
from millrace.experiments.tetris.load import load_test
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import CDF_SHARES, Report
from millrace.sim.scenario import simulate

SHARES = (0.8, 0.9, 1.0)

_PAPER = {
    "8b": {"p50": "1.64-2.78", "p99": "1.52-3.13", "throughput": "1.24-3.38"},
    "70b": {"p50": "2.86-4.17", "p99": "2.27-4.35", "throughput": "1.15-1.81"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """One testbed and trace: reports by share of the best baseline's capacity and by system.

    `capacity_rps` is of every system, and is its throughput there, since all requests finish.
    """

    best: str
    capacity_rps: Mapping[str, float]
    reports: Mapping[float, Mapping[str, Report]]

    def ratio(self, share: float, baseline: str, which: str) -> float:
        """Returns how many times lower Tetris's TTFT is."""
        ttft = {name: report.total.ttft_s for name, report in self.reports[share].items()}
        return float(getattr(ttft[baseline], which) / getattr(ttft[TETRIS], which))

    def to_json(self) -> dict[str, Any]:
        return {
            "best_baseline": self.best,
            "capacity_rps": dict(self.capacity_rps),
            "ttft_s": {
                f"{share:g}": {
                    name: {
                        "p50": report.total.ttft_s.p50,
                        "p99": report.total.ttft_s.p99,
                        "cdf": report.total.ttft_quantiles_s,
                    }
                    for name, report in by_name.items()
                }
                for share, by_name in self.reports.items()
            },
        }


def measure(quick: bool, announce: Announce) -> Outcome:
    """Measures distributions at the critical load of the best baseline, and a little below it."""
    found: dict[tuple[str, str], Critical] = {}
    size = QUICK if quick else FULL
    for key, testbed, trace in cases(quick):
        configs = systems(testbed, trace)
        del configs[SINGLE_CHUNK]
        test = load_test(testbed, trace, configs, size=size, announce=announce)
        best = test.best([name for name in configs if name != TETRIS])
        runs = {name: scenario(testbed, trace, config) for name, config in configs.items()}
        at_rps = test.curves[best].capacity_rps
        found[key, trace] = Critical(
            best=best,
            capacity_rps={name: curve.capacity_rps for name, curve in test.curves.items()},
            reports={
                share: {
                    name: simulate(loaded(of, share * at_rps, size)) for name, of in runs.items()
                }
                for share in SHARES
            },
        )
    return Outcome(
        title="Tetris figures 9 and 10: TTFT and throughput at critical loads",
        assumptions=ASSUMPTIONS,
        findings=[finding for case, one in found.items() for finding in _findings(*case, one)],
        results={f"{key}, {trace}": one.to_json() for (key, trace), one in found.items()},
        panels=[
            [
                _panel(f"{key}, {trace}, {share:.0%}", found[key, trace].reports[share])
                for share in SHARES
            ]
            for key, trace in found
        ],
    )


def _findings(key: str, trace: str, one: Critical) -> list[Finding]:
    paper = _PAPER[key]
    times = [
        Finding(
            f"{key}, {trace}: {which.upper()} below {one.best}'s at {share:.0%} of its load",
            paper[which] if share == 1.0 else "",
            f"{one.ratio(share, one.best, which):.2f}",
        )
        for which in ("p50", "p99")
        for share in SHARES
    ]
    most_rps = one.capacity_rps[TETRIS]
    gains = [most_rps / rps for name, rps in one.capacity_rps.items() if name != TETRIS and rps]
    return [
        *times,
        Finding(
            f"{key}, {trace}: throughput over the baselines'",
            paper["throughput"],
            f"{min(gains):.2f}-{max(gains):.2f}",
        ),
    ]


def _panel(title: str, reports: Mapping[str, Report]) -> Panel:
    return Panel(
        title,
        "TTFT (s)",
        "requests (%)",
        {
            name: [
                (seconds, 100 * share)
                for share, seconds in zip(CDF_SHARES, report.total.ttft_quantiles_s, strict=True)
            ]
            for name, report in reports.items()
        },
        log_x=True,
    )
