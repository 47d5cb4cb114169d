"""Prints the results of `millrace bench kernels` as a table and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.tables import judged, table

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (dtype, rows)
        for dtype in report["peaks"]["flops_per_s"]
        if (rows := [result for result in report["results"] if result["dtype"] == dtype])
    ]
    height = 1.5 + 0.24 * max((len(rows) for _, rows in panels), default=1)
    figure, grid = pyplot.subplots(
        1, max(1, len(panels)), figsize=(7 * max(1, len(panels)), height), squeeze=False
    )
    for axes, (dtype, rows) in zip(grid[0], panels, strict=False):
        places = range(len(rows))
        for side, shift, label in (("ours", -0.2, "Millrace"), ("other", 0.2, "other way")):
            shares = [result[f"{side}_share"] for result in rows]
            axes.barh([place + shift for place in places], shares, 0.38, label=label)
        labels = [f"{result['kernel']} {result['shape']}" for result in rows]
        axes.set_yticks(places, labels, fontsize=7)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.axvline(1, color="grey", linestyle=":")
        axes.set(xlabel="share of peak", title=dtype, xlim=(0, 1.5))
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
