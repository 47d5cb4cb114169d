"""Shows the results of `millrace bench engine` as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def as_table(report: dict[str, Any]) -> Table:
    """Makes a table of the report's results, one row per case; ratios below 1 in red."""
    table = Table(
        title=f"tokens/s, medians; {report['machine']['threads']} threads",
        title_justify="left",
        caption=_limits(report),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    others = report["against"]
    table.add_column("phase")
    table.add_column("dtype")
    for heading in ("size", "millrace", "of limit"):
        table.add_column(heading, justify="right")
    for other in others:
        table.add_column(other, justify="right")
        table.add_column("ratio", justify="right")
    for result in report["results"]:
        case, rates = result["case"], result["tokens_per_s"]
        cells = [case["phase"], case["dtype"], f"{case['batch']} x {case['tokens']}"]
        cells += [f"{rates['millrace']:.1f}", f"{result['machine_share']:.0%}"]
        for other in others:
            ratio = result["ratios"][other]
            cells += [f"{rates[other]:.1f}", f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}"]
        table.add_row(*cells)
    return table


def _limits(report: dict[str, Any]) -> str:
    """Describes the limits that the shares refer to."""
    gemm = ", ".join(
        f"{found['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s in {dtype}"
        for dtype, found in report["limits"].items()
    )
    read = next(iter(report["limits"].values()))["read_bytes_per_s"] / 1e9
    return (
        f"limits: of prefill, products of large matrices, {gemm}; of decode, {read:.1f} GB/s read"
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG at `path`: bars of the ratios, one group per case and one colour per engine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    results, others = report["results"], report["against"]
    labels = ["{phase} {dtype}\n{batch} x {tokens}".format(**result["case"]) for result in results]
    width = 0.8 / len(others)
    figure = Figure(figsize=(max(6, 1.1 * len(results)), 4.5), layout="constrained")
    axes = figure.subplots()
    for number, other in enumerate(others):
        at = [group + (number - (len(others) - 1) / 2) * width for group in range(len(results))]
        bars = axes.bar(at, [r["ratios"][other] for r in results], width, label=other)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(yscale="log", ylabel="tokens/s, Millrace / other")
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call] # matplotlib: untyped
