"""Prints the results of `millrace bench decode` as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.tables import table


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Prints a row per round: both rates, their ratio, and the stack's costs."""
    settings = report["settings"]
    if "telemetry" in report:
        console.print(_telemetry(report))
        return
    rows = [
        one
        | (one["costs"] or {})
        | {
            "ratio": one["stack_tokens_per_s"] / one["bare_tokens_per_s"],
            "cpu": ", ".join(f"{n} {ms:.1f}" for n, ms in one["costs"]["cpu_ms"].items())
            if one["costs"]
            else "",
        }
        for one in report["rounds"]
    ]
    made = table(
        f"decode, {settings['batch']} x {settings['prompt_tokens']} tokens of context, "
        f"{settings['dtype']}, {settings['threads']} threads",
        "stack tok/s | bare tok/s | ratio | bare step ms | step ms | between ms | "
        "CPU ms a step, by process",
        "{stack_tokens_per_s:.1f} | {bare_tokens_per_s:.1f} | {ratio:.3f} | {bare_step_ms:.2f} | "
        "{step_ms?:.2f} | {between_steps_ms?:.2f} | {cpu}",
        rows,
        caption=f"medians: {report['stack_tokens_per_s']:.1f} of "
        f"{report['bare_tokens_per_s']:.1f} tokens/s, ratio {report['ratio']:.3f}",
    )
    made.columns[-1].justify, made.columns[-1].no_wrap = "left", False
    console.print(made)


def _telemetry(report: Mapping[str, Any]) -> Table:
    names = {
        "prompt_tokens_per_s": "prompt tokens/s",
        "decode_tokens_per_s": "decoded tokens/s",
        "instances_cpu_s": "CPU s of the instances",
        "others_cpu_s": "CPU s of gateway, scheduler and client",
    }
    turns = report["telemetry"]
    rows = [
        {"name": name, "ratio": report["ratios"][key]}
        | {side: statistics.median(turn[key] for turn in turns[side]) for side in turns}
        for key, name in names.items()
    ]
    settings = report["settings"]
    return table(
        f"telemetry, {settings['batch']} x {settings['prompt_tokens']} tokens of context, "
        f"{settings['rounds']} rounds",
        "median of a round | on | off | on / off",
        "{name} | {on:.2f} | {off:.2f} | {ratio:.3f}",
        rows,
        left=1,
        caption=f"{report['trace_bytes'] / 1e6:.1f} MB of traces",
    )
