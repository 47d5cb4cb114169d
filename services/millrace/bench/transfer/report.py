"""Prints the results of `millrace bench transfer` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from millrace.tables import judged, table

GOAL = 0.8


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints rates, and the share that overlap hides; ratios below the goal in red."""
    rows = [
        rate | {way: judged(r := rate[f"{way}_ratio"], r >= GOAL) for way in ("one", "stream")}
        for rate in report["rates"]
    ]
    rates = table(
        "KV of requests against bare NIXL writes of the same bytes, medians",
        "pages | mode | MiB | shake ms | one GB/s | bare | ratio | all GB/s | bare | ratio",
        "{pages} | {mode} | {bytes:MiB.0f} | {handshake_ms:.2f} | {one_bytes_per_s:GB.2f} | "
        "{one_bare_bytes_per_s:GB.2f} | {one} | {stream_bytes_per_s:GB.2f} | "
        "{stream_bare_bytes_per_s:GB.2f} | {stream}",
        rows,
        left=2,
        caption="shake: the handshake. one: a request by itself, with its handshake. "
        f"all: a stream of requests, {report['in_flight']} in flight. checked: buffer-free, with "
        "transfer.kv_checksum, until the last sum.",
    )
    overlap = table(
        "KV still to land after the last layer, ms, medians",
        "MiB | mode | compute ms | all at the end | layer by layer | hidden",
        "{bytes:MiB.0f} | {mode} | {compute_ms:.0f} | {at_end_ms:.1f} | {layer_wise_ms:.1f} | "
        "{hidden:.0%}",
        report["overlap"],
    )
    console.print(rates)
    console.print(overlap)
