"""Prints the results of `millrace bench kernels` as a table and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Bars, draw_panels
from millrace.tables import judged, table

_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints one row per case: rates, ours as a share of the peak, and ours over the other's."""
    peaks = report["peaks"]
    rates = [f"{rate / 1e9:.0f} GFLOP/s {kind}" for kind, rate in peaks["flops_per_s"].items()]
    rows = [
        one | {"short": _SHORT[one["dtype"]], "judged": judged(one["ratio"], one["ratio"] >= 1)}
        for one in report["results"]
    ]
    made = table(
        f"Medians; {report['machine']['threads']} threads. "
        f"Peaks: {', '.join(rates)}, {peaks['bytes_per_s'] / 1e9:.1f} GB/s.\n"
        "The other way is torch's, of after_norm and after_silu the pieces they join.",
        "kernel | shape |  | millrace | other |  | share | ratio",
        "{kernel} | {shape} | {short} | {ours:.1f} | {other:.1f} | {unit} | {ours_share:.0%} | "
        "{judged}",
        rows,
        left=3,
        tight=True,
        caption="\n".join(_chunk_line(one, report["goal_chunks"]) for one in report["chunks"]),
    )
    console.print(made)


def _chunk_line(chunks: dict[str, Any], goal: float) -> str:
    (small, large), (small_us, large_us) = chunks["rows"], chunks["us_per_token"]
    ratio = judged(chunks["ratio"], chunks["ratio"] <= goal)
    return (
        f"{_SHORT[chunks['dtype']]} attention after {chunks['history']}: {small_us:.0f} µs a token "
        f"in chunks of {small}, {large_us:.0f} of {large}: {ratio}"
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG: bars of the share of peak, ours beside the other, one panel per dtype."""
    by_dtype = {
        dtype: [result for result in report["results"] if result["dtype"] == dtype]
        for dtype in report["peaks"]["flops_per_s"]
    }
    charts = [
        Bars(
            dtype,
            "share of peak",
            [f"{result['kernel']} {result['shape']}" for result in rows],
            {
                "Millrace": [result["ours_share"] for result in rows],
                "other way": [result["other_share"] for result in rows],
            },
            mark=1.0,
            limits=(0, 1.5),
            flat=True,
        )
        for dtype, rows in by_dtype.items()
        if rows
    ]
    most = max(map(len, by_dtype.values()), default=1)
    draw_panels([charts], path, (7, 1.5 + 0.24 * most))
