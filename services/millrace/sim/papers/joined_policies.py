"""Millrace's policy against each of the papers', within the same mechanisms, on all traffic.

Preemption by operator, SLO-aware batching, late binding, and CDSP where prompts are long: only the
order differs. Beside goodput: the longest wait of any request at `SUSTAINABLE` times the goodput of
FCFS's better, EDF, or at that share of Millrace's where EDF carries nothing.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from millrace.sim.papers import joined
from millrace.sim.papers.outcome import Finding, Outcome, watched

POLICIES = ("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "millrace")


def measure(folder: Path | None, quick: bool, told: joined.Told) -> Outcome:
    cases = joined.cases(folder, quick)
    edges = joined.measure(
        {
            (name, policy): (case, joined.policy(policy, case))
            for name, case in cases.items()
            for policy in POLICIES
        },
        told,
    )
    findings = []
    for name in cases:
        loads = {policy: edges[name, policy].load for policy in POLICIES}
        best = max(POLICIES[:-1], key=lambda policy: loads[policy])
        ratio = loads["millrace"] / loads[best] if loads[best] else float("inf")
        said = ", ".join(f"{policy} {load:.3g}" for policy, load in loads.items())
        findings.append(
            Finding(
                what=f"{name}: {said}",
                paper=f"best of the papers: {best}",
                ours=f"{ratio:.2f} x it",
            )
        )
    results = {
        name: {policy: edges[name, policy].to_json() for policy in POLICIES} for name in cases
    }
    return Outcome(
        title="Goodput at 90 % attainment by policy, all else equal (requests/s; traces: scale)",
        assumptions=(
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
