"""`millrace bench cdsp`: measures prompts on groups of instances, for Tetris' figures.

All parts run on this machine, with the random model of `bench hol` and one thread per instance:
prompts on 1 to 4 instances as in the paper's Table 1, with communication apart; the cost of cache
balancing and handshakes (section 7.5); the ring's exchange compared with bare NIXL writes; CDSP
compared with single-chunk and fixed groups under load, live and simulated with a profile of the
same run.

Instances share this machine's cores. A group's speedup is at most the number of cores; with more
members than cores they wait for each other: then CPU time shows the cost of a group, but TTFT does
not show its gain on other machines.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.bench.common.choices import CDSP_PARTS
from millrace.bench.common.options import measure, names, numbers


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    parts: Annotated[
        str, typer.Option("--parts", metavar="NAME,...", help="Of " + ", ".join(CDSP_PARTS) + ".")
    ] = ",".join(CDSP_PARTS),
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of each instance.")] = 1,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="TOKENS,...", help="Prompts of the part sp.")
    ] = "512,1024,2048,4096",
    sp: Annotated[
        str, typer.Option("--sp", metavar="N,...", help="Instances a prompt; 1 is measured too.")
    ] = "2,3,4",
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Of the parts sp and balancing.")
    ] = 3,
    instances: Annotated[
        int,
        typer.Option("--instances", min=0, help="Under load; 0: as many as have cores, 2 to 4."),
    ] = 0,
    requests: Annotated[int, typer.Option("--requests", min=4, help="Of every load.")] = 48,
    quick: Annotated[
        bool, typer.Option("--quick", help="A look, no figures to quote: less of everything.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: TTFT by degree, balancing, load."),
    ] = None,
) -> None:
    """Sequence-parallel groups: TTFT by degree, what they cost, and CDSP under load."""
    from millrace.bench.cdsp.report import draw, print_tables
    from millrace.bench.cdsp.run import Settings, run

    settings = Settings(
        parts=tuple(names(parts, CDSP_PARTS)),
        threads=threads,
        lengths=numbers(lengths, "--lengths"),
        degrees=tuple(sorted({1, *numbers(sp, "--sp")})),
        rounds=rounds,
        instances=instances,
        requests=requests,
    )
    if quick:
        settings = settings.quick()
    measure(partial(run, settings), print_tables, draw, json_path, plot)
