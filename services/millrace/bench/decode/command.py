"""The options of `millrace bench decode`: decode through a whole stack. `run.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 512,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps that all requests take together.")
    ] = 256,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Medians are reported.")] = 3,
    threads: Annotated[
        int,
        typer.Option(
            "--threads", min=0, help="Of decode and of the bare engine; 0: half the cores."
        ),
    ] = 0,
    prefill_threads: Annotated[
        int, typer.Option("--prefill-threads", min=0, help="0: as --threads.")
    ] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "bfloat16",
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
) -> None:
    """Decode throughput through a whole local stack, beside the bare engine's in the same run."""
    import uvloop
    from rich.console import Console

    from millrace.bench.decode.run import Settings, as_table, run

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16")
    settings = Settings(
        batch=batch,
        prompt_tokens=prompt_tokens,
        steps=steps,
        rounds=rounds,
        threads=threads,
        prefill_threads=prefill_threads,
        dtype=dtype,
    )
    console = Console(stderr=True)
    with console.status("starting") as status:
        progress = status.update if console.is_terminal else console.print
        report = uvloop.run(run(settings, progress))
    Console().print(as_table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
