"""Tetris sections 5.1, 6, 7.1: the best improvement rate of each arrival rate, by simulation.

The other experiments plan with the JSON, which is shipped beside them. Lengths and arrivals come
from a seed of their own, so no experiment is tuned on its own requests. Arrival rates go up in
steps of 0.5/s as in the paper, in finer steps where a testbed carries about one request per second;
they end when even the best rate leaves TTFT at 25 times that of the lightest load, where the
paper's curves end too.
"""

from __future__ import annotations

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.common import (
    ASSUMPTIONS,
    LIMIT_X,
    Testbed,
    cases,
    scenario,
    scheduler,
)
from millrace.sim.results.plots import Panel
from millrace.sim.studies.rate_profile import RATES, RateRow, profile_rates

SEED = 1
REQUESTS = 600


def measure(quick: bool, announce: Announce) -> Outcome:
    """Finds tables of all testbeds and traces."""
    found: dict[str, dict[str, list[RateRow]]] = {}
    for key, testbed, trace in cases(quick):
        rows = profiled(testbed, trace, announce, quick)
        found.setdefault(key, {})[trace] = rows
    labelled = [
        (f"{key}, {trace}", rows) for key, by in found.items() for trace, rows in by.items()
    ]
    return Outcome(
        title="Tetris: best improvement rate by arrival rate",
        assumptions=(*ASSUMPTIONS, "best: least mean TTFT"),
        findings=[
            Finding(f"{name}: {row.arrivals_rps:g}/s", "0.05-0.75", f"{row.best:g}")
            for name, rows in labelled
            for row in rows
        ],
        results={
            "improvement_rates": {
                key: {trace: [[r.arrivals_rps, r.best] for r in rows] for trace, rows in by.items()}
                for key, by in found.items()
            }
        },
        panels=[
            [
                Panel(
                    f"{key}, {trace}",
                    "requests/s",
                    "best improvement rate",
                    {"": [(row.arrivals_rps, row.best) for row in rows]},
                )
                for trace, rows in by.items()
            ]
            for key, by in found.items()
        ],
    )


def profiled(
    testbed: Testbed, trace: str, announce: Announce, quick: bool = False
) -> list[RateRow]:
    """Returns rows up to saturation; for a quick run two, with three rates each."""
    step_rps = testbed.steps_rps[trace]
    of = scenario(
        testbed, trace, scheduler(planner="cdsp"), requests=50 if quick else REQUESTS, seed=SEED
    )
    if quick:
        return profile_rates(of, (step_rps, 10 * step_rps), RATES[::6])
    rows: list[RateRow] = []
    while not rows or _best_s(rows[-1]) < LIMIT_X * _best_s(rows[0]):
        rate_rps = round(step_rps * (len(rows) + 1), 6)
        announce(f"{testbed.name}, {trace}: {rate_rps:g}/s")
        rows += profile_rates(of, [rate_rps])
    return rows


def _best_s(row: RateRow) -> float:
    return row.mean_ttft_s[row.best]
