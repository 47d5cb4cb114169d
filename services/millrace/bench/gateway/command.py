"""The options of `millrace bench gateway`, which measures the cost of the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Model folder with the tokenizer. Default: a tiny model."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=100, help="Unary requests.")] = 4000,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Concurrent streams.")] = 64,
    tokens: Annotated[int, typer.Option("--tokens", min=8, help="Tokens per stream.")] = 400,
    prompt_characters: Annotated[
        int, typer.Option("--prompt-characters", min=1, help="Characters of each prompt.")
    ] = 200,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the results as JSON.")
    ] = None,
) -> None:
    """Measure the proxy alone: CPU per request and per token, added latency, tokens/s."""
    import asyncio
    from dataclasses import asdict

    import orjson
    import uvloop
    from rich.console import Console
    from rich.progress import Progress

    from millrace.bench.gateway.run import GOAL_REQUEST_US, GOAL_TOKEN_US, run, table

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=6)

        def on_progress(what: str) -> None:
            progress.update(task, advance=1, description=what)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(
                run(
                    model=model,
                    requests=requests,
                    streams=streams,
                    tokens=tokens,
                    prompt_characters=prompt_characters,
                    on_progress=on_progress,
                )
            )
    console.print(table(report))
    if json is not None:
        document: dict[str, Any] = {
            **asdict(report),
            "goals": {"cpu_us_per_request": GOAL_REQUEST_US, "cpu_us_per_token": GOAL_TOKEN_US},
        }
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
