"""What the commands of `millrace sim` write and show: the document's head, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace.cli.sim.options import scheduler_settings
from millrace.sim.scenario import Scenario


def document(name: str, given: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Returns the head of a JSON document: the options, without the paths of outputs."""
    outputs = {"json", "plot", "records", "board", "gantt", "gantt_window", "jobs"}
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


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Callable[[int, float], None]]:
    """Shows how many of `total` requests have ended, and the simulated time."""
    with progress(console) as shown:
        task = shown.add_task(what, total=total, note="")

        def advance(ended: int, now_s: float) -> None:
            shown.update(task, completed=ended, note=f"simulated {now_s:,.0f} s")

        yield advance
