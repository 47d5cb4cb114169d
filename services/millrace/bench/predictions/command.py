"""The options of `millrace bench predictions`: errors of predicted first tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.options import measure, numbers


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="TOKENS,...", help="Of prompts.")
    ] = "16,32,64,128,256,512,1024,2048,4096,8192,16384,32768",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Prompts of each length.")] = 8,
    long_tokens: Annotated[
        int,
        typer.Option(
            "--long-tokens",
            min=1,
            help="Of a length's prompts together: long ones come less often.",
        ),
    ] = 65_536,
    busy: Annotated[
        int,
        typer.Option(
            "--busy", min=0, help="Other processes that compute, in a second pass; 0: no such pass."
        ),
    ] = 0,
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Prefill instances.")] = 1,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Of an instance; 0: half the cores.")
    ] = 0,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=0.1, help="Of measuring the model before.")
    ] = 4.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="PNG: predicted over real.")
    ] = None,
) -> None:
    """Predicted TTFT against the real one, through a whole stack: the shipped model, any context.

    The model's context is widened to the longest length: its times are right, its words are not.
    """
    from millrace.bench.predictions.report import draw, print_tables
    from millrace.bench.predictions.run import Settings, run

    settings = Settings(
        lengths=numbers(lengths, "--lengths"),
        repeats=repeats,
        long_tokens=long_tokens,
        busy=busy,
        prefill=prefill,
        threads=threads,
        budget_s=budget_s,
    )
    measure(partial(run, settings), print_tables, draw, json_path, plot)
