"""The options of `millrace bench kernels`: the kernels' speed. `run.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.choices import DTYPES, KERNEL_NAMES
from millrace.bench.common.options import names


def command(
    only: Annotated[
        str, typer.Option("--only", metavar="NAMES", help=f"Of {', '.join(KERNEL_NAMES)}.")
    ] = ",".join(KERNEL_NAMES),
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Comma-separated: float32, bfloat16.")
    ] = ",".join(DTYPES),
    budget_s: Annotated[float, typer.Option("--budget-s", min=0.0, help="Seconds a case.")] = 0.5,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Default: as many as torch takes.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Write the shares as a PNG.")
    ] = None,
) -> None:
    """Each kernel's speed on the CPU beside torch's own way and the machine's peaks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millrace.bench.kernels.run import Settings, as_table, draw, run

    settings = Settings(
        names=names(only, KERNEL_NAMES), dtypes=names(dtypes, DTYPES), budget_s=budget_s
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("loading")
        report = run(
            settings,
            threads=threads,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
    Console().print(as_table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        draw(report, plot)
