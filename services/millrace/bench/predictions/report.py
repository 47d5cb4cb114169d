"""Prints the results of `millrace bench predictions` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Panel, draw_panels
from millrace.tables import table

#: Goals for the median and the 95th percentile of the error, over all prompts.
MEDIAN_GOAL, P95_GOAL = 0.15, 0.4
PASSES = ("idle", "busy")

Document = dict[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints one table per pass."""
    for name in PASSES:
        if name in document:
            made = table(
                name,
                "tokens | prompts | predicted, ms | real, ms | median error | p95 error",
                "{tokens} | {prompts} | {predicted_s:ms.1f} | {real_s:ms.1f} | "
                "{median_error:.1%} | {p95_error:.1%}",
                ({"tokens": n, **row} for n, row in document[name]["lengths"].items()),
            )
            console.print(made)
            found = document[name]["all"]
            console.print(
                f"{name}: {found['median_error']:.1%} off by the median (goal {MEDIAN_GOAL:.0%}), "
                f"{found['p95_error']:.1%} at the 95th percentile (goal {P95_GOAL:.0%}), of "
                f"{found['prompts']} prompts\n"
            )


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: predicted over real time by prompt length, one curve per pass."""
    lines = {
        name: [
            (float(tokens), row["predicted_s"] / row["real_s"])
            for tokens, row in document[name]["lengths"].items()
        ]
        for name in PASSES
        if name in document
    }
    panel = Panel(
        "Predicted over real TTFT, by the median",
        "prompt, tokens",
        "predicted over real",
        lines,
        log_x=True,
        mark=1.0,
    )
    draw_panels([[panel]], path)
