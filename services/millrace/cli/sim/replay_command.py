"""`millrace sim replay`: replays a recorded live run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.file_options import READ, WRITE


@plain_errors()
def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Written by `millrace scheduler --record FILE`.", **READ
        ),
    ],
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the result as JSON.", **WRITE),
    ] = None,
) -> None:
    """Replay a recorded live run: exit 1 and show the first difference if decisions differ."""
    from millrace.sim.replay import replay
    from millrace.sim.results.report import write_json

    result = replay(path)
    if json_path is not None:
        write_json(json_path, result.to_json())
    print(f"{result.steps} steps over {result.duration_s:.3g} s, {result.effects} effects agree")
    if result.cut:
        print("the recording's last line is not whole; it was left out")
    if result.difference is not None:
        print(result.difference)
        raise typer.Exit(1)
