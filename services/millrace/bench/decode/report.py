"""Prints the results of `millrace bench decode` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from millrace.tables import table


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Prints a row per round: both rates, their ratio, and the stack's costs."""
    settings = report["settings"]
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
