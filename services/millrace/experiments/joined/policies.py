"""Millrace's policy against each of the papers', within the same mechanisms, on all traffic.

Preemption by operator, SLO-aware batching, late binding, and CDSP where prompts are long: only the
order differs. The JSON document also has the longest wait of any request at each policy's goodput.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from millrace.experiments.joined import common as joined
from millrace.experiments.outcome import Outcome, watched

POLICIES = ("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "millrace")


def measure(folder: Path | None, quick: bool, told: joined.Told) -> Outcome:
    return joined.compare(
        joined.cases(folder, quick),
        {name: partial(joined.policy, name) for name in POLICIES},
        told,
        title="Goodput at 90 % attainment by policy, all else equal (requests/s; traces: scale)",
        best_is="best of the papers: ",
    )


def run(
    console: Console,
    json_path: Path | None,
    plot_path: Path | None,
    quick: bool,
    trace: Path | None = None,
) -> None:
    """Runs the comparison.

    `trace` is a folder with the Azure and Mooncake traces; without it only mixes.
    """
    outcome = watched(console, lambda told: measure(trace, quick, told))
    outcome.publish(console, json_path, plot_path)
