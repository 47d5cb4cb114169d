"""Medha figures 1, 9 and 10: the effect of 5 % of long requests on all requests' TTFT and TBT."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from millrace.experiments.medha import common as medha
from millrace.experiments.medha.common import Hour, Load, Spread
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.plots import Panel

OURS, THEIRS = "Medha", "LoongServe"

SYSTEMS: Mapping[str, Callable[[], SimSpec]] = {
    OURS: medha.medha,
    THEIRS: medha.loongserve,
    "LoongServe, 6 of 8": lambda: medha.loongserve(6),
    "Sarathi-512": lambda: medha.sarathi(512),
    "Sarathi-2048": lambda: medha.sarathi(2048),
}

QPS = (0.25, 0.75, 1.25, 1.75)
FIGURE_1_QPS = 0.75
FRACTIONS = (0.0, 0.01, 0.05)
SEEDS = (0, 1, 2)  # draws of figure 1's requests: at this load the median depends on the draw

#: P90 of TTFT up to which the paper calls latency acceptable (section 6.4), seconds.
ACCEPTABLE_S = 10.0

Found = Mapping[str, Sequence[tuple[float, Hour]]]  # by system: (QPS, hour)
ByShare = Mapping[str, Mapping[float, Sequence[Hour]]]  # by system and share of long ones


def measure(quick: bool, announce: Announce, trace: Path | None = None) -> Outcome:
    if quick:
        return compare(announce, (0.25, FIGURE_1_QPS), 900.0, trace, SEEDS[:1])
    return compare(announce, QPS, medha.HOUR_S, trace)


def compare(
    announce: Announce,
    qps: Sequence[float],
    window_s: float,
    trace: Path | None = None,
    seeds: Sequence[int] = SEEDS,
) -> Outcome:
    """Every system at every rate, and the two of figure 1a at every share of long requests."""
    by_qps: dict[str, list[tuple[float, Hour]]] = {}
    by_share: dict[str, dict[float, list[Hour]]] = {}
    for name, build in SYSTEMS.items():
        for rate in qps:
            announce(f"{name}, {rate:g} requests/s")
            load = Load(qps=rate, window_s=window_s, trace=trace)
            by_qps.setdefault(name, []).append((rate, medha.run_hour(build(), load)))
    for name in (OURS, THEIRS):
        for share in FRACTIONS:
            announce(f"{name}, {share:.0%} long")
            load = Load(qps=FIGURE_1_QPS, long_fraction=share, window_s=window_s, trace=trace)
            by_share.setdefault(name, {})[share] = [
                medha.run_hour(SYSTEMS[name](), replace(load, seed=seed)) for seed in seeds
            ]
    return Outcome(
        title="Medha figures 1, 9, 10: the convoy effect of long requests",
        assumptions=(
            *medha.ASSUMPTIONS,
            f"short requests' lengths: {trace or 'shipped quantiles of ShareGPT'}",
            "LoongServe: whole prompts in order on elastic groups of TP2 instances, decode on "
            "eight further GPUs; '6 of 8' leaves the GPUs of two instances to decode",
            "Sarathi has Medha's dense pipeline, which favours it",
        ),
        findings=[*_ratios(by_share), *_capacities(by_qps), *_decodes(by_qps)],
        results={
            "by_qps": _plain(by_qps),
            "by_long_fraction": {
                name: {
                    f"{share:g}": [hour.to_json() for hour in hours] for share, hours in by.items()
                }
                for name, by in by_share.items()
            },
        },
        panels=_panels(by_qps),
    )


def _plain(found: Found) -> dict[str, dict[str, object]]:
    return {
        name: {f"{at:g}": hour.to_json() for at, hour in hours} for name, hours in found.items()
    }


def _ratios(found: ByShare) -> list[Finding]:
    """Section 6.4: how much longer the short requests wait in the non-preemptive system."""
    papers = {
        (0.01, "median"): "8",
        (0.05, "median"): "30",
        (0.05, "P90"): "174",
        (0.05, "P99"): "174",
    }
    return [
        Finding(
            f"{share:.0%} long: {what} of short requests' TTFT, times {than}",
            papers.get((share, what), ""),
            _range(found[THEIRS][share], others, what),
        )
        for share in FRACTIONS
        for than, others in (
            ("Medha's", found[OURS][share]),
            ("LoongServe's without long ones", found[THEIRS][0.0]),
        )
        for what in _QUANTILES
    ]


_QUANTILES: Mapping[str, Callable[[Spread], float | None]] = {
    "median": lambda spread: spread.p50_s,
    "P90": lambda spread: spread.p90_s,
    "P99": lambda spread: spread.p99_s,
}


def _range(theirs: Sequence[Hour], ours: Sequence[Hour], what: str) -> str:
    """Returns the median of the draws' ratios, least to most in brackets."""
    at = _QUANTILES[what]
    pairs = [(at(a.short), at(b.short)) for a, b in zip(theirs, ours, strict=True)]
    times = sorted(a / b if a is not None and b else math.inf for a, b in pairs)
    return f"{statistics.median(times):.1f} ({times[0]:.1f}-{times[-1]:.1f})"


def capacity(hours: Sequence[tuple[float, Hour]]) -> float:
    """Returns the largest tried rate with an acceptable P90 of TTFT; 0 if there is none."""
    carried = 0.0
    for rate, hour in hours:
        if hour.total.p90_s is None or hour.total.p90_s > ACCEPTABLE_S:
            break
        carried = rate
    return carried


def _capacities(found: Found) -> list[Finding]:
    papers = {OURS: "1.25", THEIRS: "0.25"}
    return [
        Finding(
            f"{name}: largest rate with P90 TTFT within {ACCEPTABLE_S:g} s (1/s)",
            papers.get(name, ""),
            f"{capacity(hours):g}",
        )
        for name, hours in found.items()
    ]


def _decodes(found: Found) -> list[Finding]:
    papers = {OURS: "even", "Sarathi-2048": "up to 1,000"}
    return [
        Finding(
            f"{name}: P99 TBT at {hours[-1][0]:g} requests/s (ms)",
            papers.get(name, ""),
            "-" if hours[-1][1].tbt_p99_s is None else f"{1e3 * hours[-1][1].tbt_p99_s:.0f}",
        )
        for name, hours in found.items()
    ]


def _panels(found: Found) -> list[list[Panel]]:
    """Charts one CDF per rate, as in figure 9b; a curve ends where requests got no first token."""
    rates = [rate for rate, _ in next(iter(found.values()))]
    return [
        [
            medha.cdf_panel(found, rate, f"{rate:g} requests/s, 5 % long")
            for rate in rates[start : start + 2]
        ]
        for start in range(0, len(rates), 2)
    ]
