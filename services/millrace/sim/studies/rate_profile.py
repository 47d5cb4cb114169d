"""Finds the improvement rate for each arrival rate: Tetris sections 5.1 and 6 (simulator).

Requests of one distribution of lengths arrive at each of a range of rates, and are planned with
each of a range of improvement rates; the improvement rate with the least mean TTFT is the best.
(The paper minimises "TTFT" without saying which statistic.) Every run has the same requests in the
same order, so that two runs differ only in the improvement rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millrace.core.cost.rates import ImprovementRates
from millrace.sim.scenario import Scenario, simulate

#: Section 7.1: "ranging from 0.05 to 0.75".
RATES = tuple(percent / 100 for percent in range(5, 80, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """One arrival rate: mean TTFT in seconds by improvement rate, and the best of these."""

    arrivals_rps: float
    best: float
    mean_ttft_s: dict[float, float]


def profile_rates(
    scenario: Scenario,
    arrivals_rps: Sequence[float],
    rates: Sequence[float] = RATES,
    on_run: Callable[[float, float], None] = lambda arrivals_rps, rate: None,
) -> list[RateRow]:
    """Returns one row per arrival rate, ascending; the lowest of equal rates is best."""
    rows = []
    for each_rps in sorted(arrivals_rps):
        mean_ttft_s = {}
        for rate in rates:
            planned = _with_rate(scenario, rate).at_load(each_rps)
            mean_ttft_s[rate] = simulate(planned).total.ttft_s.mean
            on_run(each_rps, rate)
        best = min(sorted(rates), key=mean_ttft_s.__getitem__)
        rows.append(RateRow(arrivals_rps=each_rps, best=best, mean_ttft_s=mean_ttft_s))
    return rows


def _with_rate(scenario: Scenario, rate: float) -> Scenario:
    """Returns the scenario with a fixed rate, and no request refused: TTFT covers all requests."""
    config = replace(
        scenario.spec.scheduler,
        improvement_rate=rate,
        max_queue_requests=10**9,
        max_queue_s=1e9,
        request_timeout_s=1e9,
    )
    return replace(scenario, spec=replace(scenario.spec, scheduler=config))


def table_of(rows: Sequence[RateRow]) -> ImprovementRates:
    """Returns the table that the scheduler looks up."""
    return ImprovementRates(rows=tuple((row.arrivals_rps, row.best) for row in rows))
