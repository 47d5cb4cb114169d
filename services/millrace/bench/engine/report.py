"""Prints the results of `millrace bench engine` as a table and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Bars, draw_panels
from millrace.tables import judged, table


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints one row per case; ratios below 1 in red."""
    others = report["against"]
    rows = [
        one | {"judged": {name: judged(ratio, ratio >= 1) for name, ratio in one["ratios"].items()}}
        for one in report["results"]
    ]
    made = table(
        f"tokens/s, medians; {report['machine']['threads']} threads",
        "phase | dtype | size | millrace | of limit" + "".join(f" | {o} | ratio" for o in others),
        "{case[phase]} | {case[dtype]} | {case[batch]} x {case[tokens]} | "
        "{tokens_per_s[millrace]:.1f} | {machine_share:.0%}"
        + "".join(f" | {{tokens_per_s[{o}]:.1f}} | {{judged[{o}]}}" for o in others),
        rows,
        left=2,
        caption=_limits(report),
    )
    console.print(made)


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
    results, others = report["results"], report["against"]
    labels = ["{phase} {dtype}\n{batch} x {tokens}".format(**result["case"]) for result in results]
    ratios = {other: [result["ratios"][other] for result in results] for other in others}
    unit = "tokens/s, Millrace / other"
    chart = Bars("", unit, labels, ratios, mark=1.0, form="%.2f", log=True)
    draw_panels([[chart]], path, (max(6, 1.1 * len(results)), 4.5))
