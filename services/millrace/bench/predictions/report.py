"""Prints the results of `millrace bench predictions` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels

#: Goals for the median and the 95th percentile of the error, over all prompts.
MEDIAN_GOAL, P95_GOAL = 0.15, 0.4
PASSES = ("idle", "busy")

Document = Mapping[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints one table per pass."""
    for name in PASSES:
        if name in document:
            console.print(_table(name, document[name]))
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
        title="Predicted over real TTFT, by the median",
        x="prompt, tokens",
        y="predicted over real",
        lines=lines,
        log_x=True,
        mark=1.0,
    )
    draw_panels([[panel]], path)


def _table(name: str, found: Document) -> Table:
    table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("tokens", "prompts", "predicted, ms", "real, ms", "median error", "p95 error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tokens, row in found["lengths"].items():
        table.add_row(
            *(tokens, str(row["prompts"])),
            *(f"{row['predicted_s'] * 1e3:.1f}", f"{row['real_s'] * 1e3:.1f}"),
            *(f"{row['median_error']:.1%}", f"{row['p95_error']:.1%}"),
        )
    return table
