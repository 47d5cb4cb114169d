"""Reads the options that several commands of `millrace sim` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace.cli.sim.options import (
    ClusterOptions,
    SystemOptions,
    TrafficOptions,
    build_systems,
    scheduler_settings,
)
from millrace.sim.scenario import Scenario


def systems(
    given: dict[str, Any],
    policies: list[str],
    planners: list[str],
    preemptions: list[str],
    batch_tokens: list[int],
) -> dict[str, Scenario]:
    def taken(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    cluster = taken("profile", "decode_profile", "prefill", "decode", "mixed", "kvp", "spp")
    traffic = taken("trace", "mix", "window", "rate", "rate_scale", "slo_scale")
    traffic |= taken("long_fraction", "requests", "seed")
    return build_systems(
        ClusterOptions(
            **cluster,
            failures=given["failure"],
            autoscale=given["autoscale"],
            settings=given["settings"],
        ),
        TrafficOptions(**traffic, slo_classes=given["slo_class"]),
        SystemOptions(
            policies=policies,
            planners=planners,
            preemptions=preemptions,
            batch_tokens=batch_tokens,
        ),
    )


def document(name: str, given: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Returns the head of a JSON document: the options, without the paths of outputs."""
    outputs = {"json", "plot", "records", "gantt", "gantt_window", "jobs"}
    asked = {
        option: str(value) if isinstance(value, Path) else value
        for option, value in given.items()
        if option not in outputs
    }
    return {
        "simulation": name,
        "settings": asked,
        "scheduler": scheduler_settings(scenario.spec.scheduler),
    }


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=4,
        transient=True,
    )
