"""Shows the report of `millrace bench transfer` as tables."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from millrace.bench.transfer.receiver import MIB


def as_tables(report: dict[str, Any]) -> list[Table]:
    """Makes tables of rates, and of the share that overlap hides; ratios below 0.8 in red."""
    title = "KV of requests against bare NIXL writes of the same bytes, medians"
    rates = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("pages", "mode"):
        rates.add_column(heading, no_wrap=True)
    for heading in ("MiB", "shake ms", "one GB/s", "bare", "ratio", "all GB/s", "bare", "ratio"):
        rates.add_column(heading, justify="right", min_width=4)
    for rate in report["rates"]:
        cells = [rate["pages"], rate["mode"], str(rate["bytes"] // MIB)]
        cells.append(f"{rate['handshake_ms']:.2f}")
        for shape in ("one", "stream"):
            ratio = rate[f"{shape}_ratio"]
            cells.append(f"{rate[f'{shape}_bytes_per_s'] / 1e9:.2f}")
            cells.append(f"{rate[f'{shape}_bare_bytes_per_s'] / 1e9:.2f}")
            cells.append(f"[{'green' if ratio >= 0.8 else 'red'}]{ratio:.2f}")
        rates.add_row(*cells)
    rates.caption = (
        "shake: the handshake. one: a request by itself, with its handshake. "
        f"all: a stream of requests, {report['in_flight']} in flight."
    )
    overlap = Table(title="KV still to land after the last layer, ms, medians")
    for heading in ("MiB", "mode", "compute ms", "all at the end", "layer by layer", "hidden"):
        overlap.add_column(heading, justify="left" if heading == "mode" else "right")
    for found in report["overlap"]:
        overlap.add_row(
            str(found["bytes"] // MIB),
            found["mode"],
            f"{found['compute_ms']:.0f}",
            f"{found['at_end_ms']:.1f}",
            f"{found['layer_wise_ms']:.1f}",
            f"{found['hidden']:.0%}",
        )
    return [rates, overlap]
