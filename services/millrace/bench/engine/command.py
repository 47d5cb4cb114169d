"""The options of `millrace bench engine`: the engine's speed. `run.py` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.choices import DTYPES
from millrace.bench.common.options import names


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="ENGINES", help="Comma-separated: transformers, llama.cpp."
        ),
    ] = "transformers,llama.cpp",
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Comma-separated: float32, bfloat16.")
    ] = "float32,bfloat16",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="TOKENS", help="Prompt lengths, comma-separated.")
    ] = "512,2048,8192",
    batches: Annotated[
        str, typer.Option("--batches", metavar="SIZES", help="Decode batches, comma-separated.")
    ] = "1,8",
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="TOKENS", help="Decode contexts, comma-separated.")
    ] = "512,2048",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps a repetition.")] = 24,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Repetitions at most; medians are reported.")
    ] = 3,
    budget_s: Annotated[
        float,
        typer.Option(
            "--budget-s", min=0.0, help="Seconds an engine may repeat a case for; once it does."
        ),
    ] = 5.0,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Default: as many as torch takes.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Write the ratios as a PNG.")
    ] = None,
) -> None:
    """Engine speed on the CPU: prefill and decode tokens/s beside other engines, in one run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from millrace.bench.engine.report import as_table, draw
    from millrace.bench.engine.run import OTHERS, Settings, run

    settings = Settings(
        against=names(against, OTHERS),
        dtypes=names(dtypes, DTYPES),
        prefill_tokens=_numbers(prefill),
        batches=_numbers(batches),
        contexts=_numbers(contexts),
        steps=steps,
        repeats=repeats,
        budget_s=budget_s,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("measuring the machine", total=None)
        report = run(
            settings,
            threads=threads,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
        progress.update(bar, completed=len(report["results"]), description="done")
    Console().print(as_table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        draw(report, plot)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 512,2048") from error
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return numbers
