"""Prints the results of `millrace bench scheduler` as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from millrace.tables import judged, table


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Prints one row per case; in red where the order misses its goal."""
    goal = report["goal_ms"]

    def row(one: dict[str, Any]) -> dict[str, Any]:
        order, step = one["all"]["order_ms"], one["all"]["step_ms"]
        kinds = one["events"].values()
        return one | {
            "order": judged(order["p99"], order["p99"] <= goal, ".2f"),
            "longest": order["max"],
            "step": step["p50"],
            "step99": step["p99"],
            "worst": max(kind["step_ms"]["p50"] for kind in kinds),
        }

    made = table(
        f"CPU milliseconds of an event, {report['settings']['waiting']} requests wait; "
        f"goal of the order's p99: {goal:g}",
        "policy | objectives | waits for | prefill | order p99 | max | step p50 | p99 | "
        "p50 of the dearest event",
        "{policy} | {objectives} | {waits_for} | {prefill} | {order} | {longest:.2f} | "
        "{step:.2f} | {step99:.2f} | {worst:.2f}",
        [row(one) for one in report["results"]],
        left=3,
        tight=True,
    )
    console.print(made)
