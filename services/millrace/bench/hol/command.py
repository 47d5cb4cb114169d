"""`millrace bench hol`: measures head-of-line blocking in prefill, for FlowPrefill's figures.

All parts run on this machine. In this process: a profile of the model, the time that a preemption
waits (section 6.4, figure 12), and the cost of checks at operators. Then, for one system after
another, a live stack of one prefill and one decode instance: the highest rate with 90 % of the
requests in time (goodput, section 6.1, figure 9), and short prompts that arrive during a long
prompt. The simulator runs the same requests with the profile of this run.

The model is a random Llama of 27 million parameters in 16 layers: deep and thin, so that one
operator takes about the same share of a prompt as on the paper's 8B, and so fast on one thread
(some 1,400 tokens/s on a machine with AVX2) that prompts a twentieth as long as the paper's take
tens (text) and hundreds (search, file) of milliseconds. Requests ask for one token: decode shares
the cores with prefill here and is not measured.

Objectives are multiples of isolated TTFTs (`traffic.py`); they are measured once, on the first
system's stack, and hold for all systems. A search begins at the goodput that the simulator
predicts.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.options import measure, names
from millrace.bench.hol.systems import NAMES


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    model: Annotated[
        str,
        typer.Option("--model", metavar="FOLDER", help="Default: a random Llama, 27M parameters."),
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Of each engine; 0: half the cores.")
    ] = 0,
    scale: Annotated[
        float,
        typer.Option("--scale", min=1.0, help="Prompts and chunks are the paper's over this."),
    ] = 20.0,
    slo_scale: Annotated[
        float, typer.Option("--slo-scale", min=0.01, help="Times all objectives.")
    ] = 1.0,
    systems: Annotated[
        str, typer.Option("--systems", metavar="NAME,...", help="Of " + ", ".join(NAMES) + ".")
    ] = ",".join(NAMES),
    rates: Annotated[
        str,
        typer.Option("--rates", metavar="RATE,...", help="Requests/s; default: a search."),
    ] = "",
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.01, help="The search's, as a share.")
    ] = 0.12,
    requests: Annotated[int, typer.Option("--requests", min=10, help="Of every run.")] = 100,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="SEED,...", help="A draw of requests each.")
    ] = "0",
    long_tokens: Annotated[
        int, typer.Option("--long-tokens", min=64, help="Of the prompt that short ones meet.")
    ] = 2048,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A look, no figures to quote: three systems, short runs."),
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: attainment by rate and class, blocking."),
    ] = None,
) -> None:
    """Head-of-line blocking: goodput by system, live and simulated, and what preemption costs."""
    from millrace.bench.hol.report import draw, print_tables
    from millrace.bench.hol.run import Settings, run

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16")
    settings = Settings(
        model=model,
        dtype=dtype,
        threads=threads,
        scale=scale,
        slo_scale=slo_scale,
        systems=tuple(names(systems, NAMES)),
        rates=_rates(rates),
        tolerance=tolerance,
        requests=requests,
        seeds=_seeds(seeds),
        long_tokens=long_tokens,
    )
    if quick:
        settings = settings.quick()
    measure(partial(run, settings), print_tables, draw, json_path, plot)


def _rates(text: str) -> tuple[float, ...]:
    """Returns ascending requests/s. Raises BadParameter."""
    try:
        found = sorted(float(part) for part in text.split(",")) if text else []
    except ValueError:
        found = [math.nan]
    if not all(0.0 < rate < math.inf for rate in found):
        raise typer.BadParameter(f"--rates {text!r}: write numbers above 0 with commas between")
    return tuple(found)


def _seeds(text: str) -> tuple[int, ...]:
    """Raises BadParameter."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"--seeds {text!r}: write whole numbers with commas between"
        ) from None
