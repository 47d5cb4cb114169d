"""`millrace sim profile-rates`: the table from which the scheduler takes its improvement rate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from millrace.core.improvement_rate import format_rates
from millrace.sim.arguments import (
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
    document,
    plain_errors,
    progress,
    systems,
)
from millrace.sim.mixes import LONG_FRACTION
from millrace.sim.options import parse_numbers
from millrace.sim.rate_profile import RATES, profile_rates, table_of
from millrace.sim.report import write_json
from millrace.sim.tables import print_rates

_GIVEN = ",".join(f"{rate:g}" for rate in RATES)


@plain_errors
def rates_command(  # noqa: PLR0913 - every option of the command line is a parameter
    trace: Trace = None,
    mix: MixName = "",
    window: Window = "",
    arrivals: Annotated[
        str, typer.Option("--arrivals", metavar="R,R,...", help="Arrival rates, requests/s.")
    ] = "0.5,1,1.5,2,2.5,3,3.5,4",
    rates: Annotated[
        str, typer.Option("--rates", metavar="R,R,...", help="Improvement rates to try, 0 to 1.")
    ] = _GIVEN,
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
    """The best improvement rate of each arrival rate, for lengths as a trace or mix has them.

    Prints it as the settings with which a scheduler, here or live, looks it up.
    """
    given = dict(locals())
    tried_rps, tried = parse_numbers(arrivals, "--arrivals"), parse_numbers(rates, "--rates")
    absent = {"rate": 1.0, "rate_scale": 1.0, "slo_scale": 1.0, "slo_class": [], "failure": []}
    absent |= {"mixed": 0, "kvp": 0, "spp": 1, "long_fraction": LONG_FRACTION, "autoscale": []}
    found = systems(given | absent, ["fcfs"], [planner], ["none"], [0])
    scenario = next(iter(found.values()))
    console = Console()
    with progress(console) as shown:
        bar = shown.add_task("runs", total=len(tried_rps) * len(tried), note="")

        def told(arrivals_rps: float, rate: float) -> None:
            shown.update(bar, advance=1, note=f"{arrivals_rps:g}/s, improvement rate {rate:g}")

        rows = profile_rates(scenario, tried_rps, tried, told)
    print_rates(rows, console)
    setting = format_rates(table_of(rows))
    print(f"scheduler.improvement_rate=-1\nscheduler.improvement_rates={setting}")
    if json is not None:
        results = {"improvement_rates": setting, "rows": [asdict(row) for row in rows]}
        write_json(json, document("profile-rates", given, scenario) | {"results": results})
