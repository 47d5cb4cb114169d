"""Prints the results of `millrace bench planner` as a table and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Bars, draw_panels
from millrace.tables import judged, table


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints one row per model, pool and collector state, as average / maximum, with the paper's;
    in red where the goal is missed.
    """
    goals = report["goal_us"]

    def pair(*found_us: float) -> str:
        pairs = zip(found_us, goals, strict=True)
        return " / ".join(judged(us, us <= goal, ".1f") for us, goal in pairs)

    rows = [
        one
        | {
            "first": pair(one["avg_us"], one["max_us"]),
            "median": pair(one["median_avg_us"], one["median_max_us"]),
            "paper": " / ".join(map(str, report["paper_us"].get(str(one["max_sp"]), ()))),
        }
        for one in report["results"]
    ]
    made = table(
        f"Microseconds a plan, average / maximum; goal {goals[0]:g} / {goals[1]:g}",
        "model | gc | max SP | first pass | median pass | paper | chunks | SP",
        "{model} | {gc} | {max_sp} | {first} | {median} | {paper} | {mean_chunks:.1f} | "
        "{mean_last_sp:.1f}",
        rows,
        left=2,
        tight=True,
    )
    console.print(made)


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG: bars of the median pass, collector off, beside the paper's Table 2."""
    sizes = report["settings"]["max_sp"]
    series = {"paper": [report["paper_us"].get(str(sp), (0.0, 0.0)) for sp in sizes]}
    for result in report["results"]:
        if result["gc"] == "off":
            pair = (result["median_avg_us"], result["median_max_us"])
            series.setdefault(f"Millrace, {result['model']}", []).append(pair)
    groups = [f"SP {sp} at most" for sp in sizes]
    charts = [
        Bars(
            title,
            "µs a plan",
            groups,
            {name: [pair[which] for pair in pairs] for name, pairs in series.items()},
            mark=report["goal_us"][which],
            form="%.0f",
        )
        for which, title in enumerate(("average", "maximum"))
    ]
    draw_panels([charts], path, (4.8, 3.8))
