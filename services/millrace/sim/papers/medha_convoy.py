"""Medha figures 1, 9 and 10: what 5 % of long requests do to everybody's TTFT and TBT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from millrace.sim.mixes import LONG_FRACTION
from millrace.sim.papers import medha
from millrace.sim.papers.medha import Hour, Load
from millrace.sim.papers.outcome import Finding, Outcome, watched
from millrace.sim.plots import Panel
from millrace.sim.spec import SimSpec

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

#: P90 of TTFT up to which the paper calls latency acceptable (section 6.4), seconds.
ACCEPTABLE_S = 10.0

Found = Mapping[str, Sequence[tuple[float, Hour]]]  # by system: (QPS or share of long ones, hour)


def measure(
    told: Callable[[str], None], qps: Sequence[float], window_s: float, trace: Path | None = None
) -> Outcome:
    """Every system at every rate, and the two of figure 1a at every share of long requests."""
    by_qps: dict[str, list[tuple[float, Hour]]] = {}
    by_share: dict[str, list[tuple[float, Hour]]] = {}
    for name, build in SYSTEMS.items():
        for rate in qps:
            told(f"{name}, {rate:g} requests/s")
            load = Load(qps=rate, window_s=window_s, trace=trace)
            by_qps.setdefault(name, []).append((rate, medha.run_hour(build(), load)))
    for name in (OURS, THEIRS):
        for share in FRACTIONS:
            told(f"{name}, {share:.0%} long")
            load = Load(qps=FIGURE_1_QPS, long_fraction=share, window_s=window_s, trace=trace)
            hour = dict(by_qps[name]).get(FIGURE_1_QPS) if share == LONG_FRACTION else None
            by_share.setdefault(name, []).append(
                (share, hour or medha.run_hour(SYSTEMS[name](), load))
            )
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
            "by_long_fraction": _plain(by_share),
        },
        panels=_panels(by_qps),
    )


def _plain(found: Found) -> dict[str, dict[str, object]]:
    return {
        name: {f"{at:g}": hour.to_json() for at, hour in hours} for name, hours in found.items()
    }


def _ratios(found: Found) -> list[Finding]:
    """Section 6.4: how much longer the short requests wait at the non-preemptive system."""
    papers = {0.01: ("8", ""), 0.05: ("30", "174")}
    findings = []
    for (share, ours), (_, theirs) in zip(found[OURS], found[THEIRS], strict=True):
        half, tail = papers.get(share, ("", ""))
        for what, paper, a, b in (
            ("median", half, theirs.short.p50_s, ours.short.p50_s),
            ("P90", tail, theirs.short.p90_s, ours.short.p90_s),
            ("P99", tail, theirs.short.p99_s, ours.short.p99_s),
        ):
            findings.append(
                Finding(
                    what=f"{share:.0%} long: {what} of short requests' TTFT, times Medha's",
                    paper=paper,
                    ours=medha.ratio(a, b),
                )
            )
        at_rest = found[THEIRS][0][1].short
        for what, a, b in (
            ("median", theirs.short.p50_s, at_rest.p50_s),
            ("P90", theirs.short.p90_s, at_rest.p90_s),
        ):
            findings.append(
                Finding(
                    what=f"{share:.0%} long: LoongServe's {what}, times its own without long ones",
                    paper={"median": half, "P90": tail}[what],
                    ours=medha.ratio(a, b),
                )
            )
    return findings


def capacity(hours: Sequence[tuple[float, Hour]]) -> float:
    """The largest rate tried up to which P90 of TTFT is acceptable; 0 if none is."""
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
            what=f"{name}: largest rate with P90 TTFT within {ACCEPTABLE_S:g} s (1/s)",
            paper=papers.get(name, ""),
            ours=f"{capacity(hours):g}",
        )
        for name, hours in found.items()
    ]


def _decodes(found: Found) -> list[Finding]:
    papers = {OURS: "even", "Sarathi-2048": "up to 1,000"}
    return [
        Finding(
            what=f"{name}: P99 TBT at {hours[-1][0]:g} requests/s (ms)",
            paper=papers.get(name, ""),
            ours="-" if hours[-1][1].tbt_p99_s is None else f"{1e3 * hours[-1][1].tbt_p99_s:.0f}",
        )
        for name, hours in found.items()
    ]


def _panels(found: Found) -> list[list[Panel]]:
    """A CDF a rate, as in figure 9b; a curve ends where requests never did."""
    rates = [rate for rate, _ in next(iter(found.values()))]
    return [
        [
            Panel(
                title=f"{rate:g} requests/s, 5 % long",
                x="TTFT (s)",
                y="requests (%)",
                lines={
                    name: [
                        (ttft_s, 5.0 * step)
                        for step, ttft_s in enumerate(dict(hours)[rate].ttft_cdf_s)
                        if ttft_s is not None
                    ]
                    for name, hours in found.items()
                },
                log_x=True,
            )
            for rate in rates[start : start + 2]
        ]
        for start in range(0, len(rates), 2)
    ]


def run(
    console: Console,
    json_path: Path | None,
    plot_path: Path | None,
    quick: bool,
    trace: Path | None = None,
) -> None:
    """See `papers.Experiment`."""
    rates, window_s = ((0.25, 0.75), 900.0) if quick else (QPS, medha.HOUR_S)
    outcome = watched(console, lambda told: measure(told, rates, window_s, trace))
    outcome.publish(console, json_path, plot_path)
