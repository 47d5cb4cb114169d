"""The options of `millrace bench planner`: the cost of a plan. `run.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    trials: Annotated[int, typer.Option("--trials", min=1, help="Plans a pool.")] = 1000,
    passes: Annotated[int, typer.Option("--passes", min=1, help="Times each is repeated.")] = 5,
    queue_s: Annotated[
        float, typer.Option("--queue-s", min=0.0, help="Longest queue time, seconds.")
    ] = 1.0,
    improvement_rate: Annotated[float, typer.Option("--improvement-rate", min=0.0, max=1.0)] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Of the trials.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Write the bars as a PNG.")
    ] = None,
) -> None:
    """Cost of one CDSP plan for pools of 8 to 128 instances (Tetris Table 2)."""
    from rich.console import Console
    from rich.progress import Progress

    from millrace.bench.planner.run import Settings, as_table, draw, run

    settings = Settings(
        trials=trials,
        passes=passes,
        queue_s=queue_s,
        improvement_rate=improvement_rate,
        seed=seed,
    )
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("planning")
        report = run(
            settings,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    Console().print(as_table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        draw(report, plot)
