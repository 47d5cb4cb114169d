"""`millrace sim profile-rates`: the table from which the scheduler takes its improvement rate."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.cli.sim import arguments as of


@plain_errors()
def rates_command(  # noqa: PLR0913 - every option of the command line is a parameter
    trace: of.Trace = None,
    mix: of.MixName = "",
    window: of.Window = "",
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
    requests: of.Requests = None,
    seed: of.Seed = 0,
    profile: of.ProfileName = of.DEFAULT_PROFILE,
    decode_profile: of.DecodeProfile = "",
    prefill: of.Prefill = 16,
    decode: of.Decode = 2,
    planner: Annotated[str, typer.Option("--planner", help=of.PLANNER_HELP)] = "cdsp",
    settings: of.Settings = [],  # noqa: B006 - typer wants a literal default
    json: of.Json = None,
) -> None:
    """Find the best improvement rate for each arrival rate, with a trace's or mix's lengths.

    Prints the table as settings for a scheduler, simulated or live.
    """
    given = dict(locals())
    from millrace.cli.sim.studies.rates_run import run_rates

    run_rates(given)
