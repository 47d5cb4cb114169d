"""The options of `millrace bench transfer`: KV transfer. `run.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MIB", help="KV sizes in MiB, comma-separated.")
    ] = "8,64,256",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Repetitions; medians are reported.")
    ] = 5,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, help="Requests of a stream at a time.")
    ] = 4,
    overlap: Annotated[
        int, typer.Option("--overlap", min=1, metavar="MIB", help="KV size of the overlap test.")
    ] = 64,
    layer_ms: Annotated[
        float, typer.Option("--layer-ms", min=0.01, help="Compute of a layer, milliseconds.")
    ] = 4.0,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads.")] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
) -> None:
    """KV transfer between two processes: rate against bare NIXL writes, and what overlap hides."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millrace.bench.transfer.report import as_tables
    from millrace.bench.transfer.run import run

    try:
        sizes_mib = [int(part) for part in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{sizes!r} is not a list of whole numbers like 8,64") from error
    if min(sizes_mib) < 1:
        raise typer.BadParameter(f"{sizes!r}: every size must be at least 1")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=None)
        report = run(
            sizes_mib=sizes_mib,
            repeats=repeats,
            in_flight=in_flight,
            overlap_mib=overlap,
            layer_ms=layer_ms,
            threads=threads,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
        progress.update(bar, description="done")
    for table in as_tables(report):
        Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
