"""Millrace against each paper's system alone and a plain chunked server, on all traffic."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from millrace.experiments.joined import common as joined
from millrace.experiments.outcome import Outcome, watched


def measure(folder: Path | None, quick: bool, told: joined.Told) -> Outcome:
    return joined.compare(
        joined.cases(folder, quick),
        joined.SYSTEMS,
        told,
        title="Goodput at 90 % attainment by system (requests/s; traces: scale of their times)",
        assumptions=["16 A100s each: 8 for prefill and 8 for decode, or all for both"],
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
