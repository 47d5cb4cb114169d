"""Millrace against each paper's system alone and a plain chunked server, on all traffic."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from millrace.sim.papers import joined
from millrace.sim.papers.outcome import Finding, Outcome, watched


def measure(folder: Path | None, quick: bool, told: joined.Told) -> Outcome:
    cases = joined.cases(folder, quick)
    edges = joined.measure(
        {
            (name, system): (case, spec(case))
            for name, case in cases.items()
            for system, spec in joined.SYSTEMS.items()
        },
        told,
    )
    findings = []
    for name in cases:
        loads = {system: edges[name, system].load for system in joined.SYSTEMS}
        others = {system: load for system, load in loads.items() if system != "Millrace"}
        best = max(others, key=lambda system: others[system])
        ratio = loads["Millrace"] / others[best] if others[best] else float("inf")
        said = ", ".join(f"{system} {load:.3g}" for system, load in loads.items())
        findings.append(Finding(what=f"{name}: {said}", paper=best, ours=f"{ratio:.2f} x it"))
    results = {
        name: {system: edges[name, system].to_json() for system in joined.SYSTEMS} for name in cases
    }
    return Outcome(
        title="Goodput at 90 % attainment by system (requests/s; traces: scale of their times)",
        assumptions=(
            "16 A100s each: 8 for prefill and 8 for decode, or all for both",
            f"objectives: Table 2 for the Qwen mix, else {joined.SLO_SCALE:g} x the default",
            "Medha mix and mixed: 90 % of every class; other traffic: 90 % of all",
        ),
        findings=findings,
        results=results,
        panels=[[joined.panel(results, "Goodput at 90 % attainment")]],
    )


def run(
    console: Console,
    json_path: Path | None,
    plot_path: Path | None,
    quick: bool,
    trace: Path | None = None,
) -> None:
    """`trace` is a folder with the Azure and Mooncake traces; without it the mixes alone."""
    outcome = watched(console, lambda told: measure(trace, quick, told))
    outcome.publish(console, json_path, plot_path)
