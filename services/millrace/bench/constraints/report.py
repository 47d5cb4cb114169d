"""Prints the results of `millrace bench constraints` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from millrace.tables import judged, table


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Prints a row per kind; in red where a constraint costs more than the goal."""
    settings, goal = report["settings"], report["goal_share"]
    rows = [
        one | {"cost": judged(one["cost_share"], one["cost_share"] <= goal, ".1%")}
        for one in report["results"]
    ]
    made = table(
        f"decode of {settings['batch']} sequences, {settings['vocabulary']} tokens of vocabulary, "
        f"{settings['dtype']}; goal of the cost: {goal:.0%}",
        "constraint | compile ms | mask µs p50 | p99 | forced | free step ms | constrained | cost",
        "{kind} | {compile_ms:.1f} | {mask_us[p50]:.0f} | {mask_us[p99]:.0f} | "
        "{forced_share:.1%} | "
        "{free_step_ms:.2f} | {constrained_step_ms:.2f} | {cost}",
        rows,
        left=1,
    )
    console.print(made)
