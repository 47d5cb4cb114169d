"""The report of `millrace bench transfer` as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from millrace.bench.transfer_receiver import MIB


def as_tables(report: dict[str, Any]) -> list[Table]:
    """Rates, and what overlap hides; ratios below 0.8 in red."""
    rates = Table(title="KV of a request against a bare NIXL write, medians")
    for heading in ("MiB", "pages", "mode", "GB/s", "bare GB/s", "handshake ms", "ratio"):
        rates.add_column(heading, justify="left" if heading in ("pages", "mode") else "right")
    for rate in report["rates"]:
        rates.add_row(
            str(rate["bytes"] // MIB),
            rate["pages"],
            rate["mode"],
            f"{rate['kv_bytes_per_s'] / 1e9:.2f}",
            f"{rate['bare_bytes_per_s'] / 1e9:.2f}",
            f"{rate['handshake_ms']:.2f}",
            f"[{'green' if rate['ratio'] >= 0.8 else 'red'}]{rate['ratio']:.2f}",
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
