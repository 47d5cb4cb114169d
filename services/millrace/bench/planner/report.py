"""Prints the results of `millrace bench planner` as a table and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.tables import judged, table


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = report["settings"]["max_sp"]
    series = {"paper": [report["paper_us"].get(str(sp), (0.0, 0.0)) for sp in sizes]}
    for result in report["results"]:
        if result["gc"] == "off":
            pair = (result["median_avg_us"], result["median_max_us"])
            series.setdefault(f"Millrace, {result['model']}", []).append(pair)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for which, (title, goal) in enumerate(
        zip(("average", "maximum"), report["goal_us"], strict=True)
    ):
        for number, (label, pairs) in enumerate(series.items()):
            places = [index + (number - 1) * 0.27 for index in range(len(sizes))]
            bars = axes[which].bar(places, [pair[which] for pair in pairs], 0.27, label=label)
            axes[which].bar_label(bars, fmt="%.0f", fontsize=7)
        axes[which].axhline(goal, color="grey", linestyle=":")
        axes[which].set_xticks(range(len(sizes)), [str(sp) for sp in sizes])
        axes[which].set(title=title, xlabel="largest SP degree", ylabel="µs a plan")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
