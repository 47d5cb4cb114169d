"""The report of `millrace bench transfer` as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from millrace.bench.transfer_receiver import MIB


def as_tables(report: dict[str, Any]) -> list[Table]:
    """Rates, and what overlap hides; ratios below 0.8 in red."""
    rates = Table(title="KV of requests against bare NIXL writes of the same bytes, medians")
    headings = ("shake\nms", "one\nGB/s", "bare", "ratio", "stream\nGB/s", "bare", "ratio")
    for heading in ("MiB", "pages", "mode", *headings):
        left = heading in ("pages", "mode")
        rates.add_column(heading, justify="left" if left else "right", no_wrap=left)
    for rate in report["rates"]:
        cells = [str(rate["bytes"] // MIB), rate["pages"], rate["mode"]]
        cells.append(f"{rate['handshake_ms']:.2f}")
        for shape in ("one", "stream"):
            ratio = rate[f"{shape}_ratio"]
            cells.append(f"{rate[f'{shape}_bytes_per_s'] / 1e9:.2f}")
            cells.append(f"{rate[f'{shape}_bare_bytes_per_s'] / 1e9:.2f}")
            cells.append(f"[{'green' if ratio >= 0.8 else 'red'}]{ratio:.2f}")
        rates.add_row(*cells)
    rates.caption = (
        "shake: the handshake. one: a request by itself, with its handshake. "
        f"stream: requests one after another, {report['in_flight']} in flight."
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
