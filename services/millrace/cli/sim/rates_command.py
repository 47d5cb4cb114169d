"""`millrace sim profile-rates`: the table from which the scheduler takes its improvement rate."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.sim.arguments import (
    DEFAULT_PROFILE,
    PLANNER_HELP,
    Decode,
    DecodeProfile,
    Json,
    MixName,
    Prefill,
    ProfileName,
    Requests,
    Seed,
    Settings,
    Trace,
    Window,
    plain_errors,
)


@plain_errors
def rates_command(  # noqa: PLR0913 - every option of the command line is a parameter
    trace: Trace = None,
    mix: MixName = "",
    window: Window = "",
    arrivals: Annotated[
        str, typer.Option("--arrivals", metavar="R,R,...", help="Arrival rates, requests/s.")
    ] = "0.5,1,1.5,2,2.5,3,3.5,4",
    rates: Annotated[
        str,
        typer.Option(
            "--rates",
            metavar="R,R,...",
            help="Improvement rates to try, 0 to 1. Default: 0.05,0.1,...,0.75.",
        ),
    ] = "",
    requests: Requests = None,
    seed: Seed = 0,
    profile: ProfileName = DEFAULT_PROFILE,
    decode_profile: DecodeProfile = "",
    prefill: Prefill = 16,
    decode: Decode = 2,
    planner: Annotated[str, typer.Option("--planner", help=PLANNER_HELP)] = "cdsp",
    settings: Settings = [],  # noqa: B006 - typer wants a literal default
    json: Json = None,
) -> None:
    """Find the best improvement rate for each arrival rate, with a trace's or mix's lengths.

    Prints the table as settings for a scheduler, simulated or live.
    """
    given = dict(locals())
    from millrace.cli.sim.rates_run import run_rates

    run_rates(given)
