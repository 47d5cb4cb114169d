"""`millrace sim compare`: two systems on the same requests, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.cli.sim import arguments as of
from millrace.sim.workload.mixes import LONG_FRACTION

_SYSTEM_HELP = "A policy, or AXIS=VALUE,...: axes policy, planner, preemption, batch_tokens."
System = Annotated[str, typer.Argument(help=_SYSTEM_HELP)]


@plain_errors()
def compare_command(  # noqa: PLR0913 - every option of the command line is a parameter
    a: System,
    b: System,
    trace: of.Trace = None,
    mix: of.MixName = "",
    window: of.Window = "",
    rate: of.Rate = None,
    rate_scale: of.RateScale = 1.0,
    slo_scale: of.SloScale = 1.0,
    slo_class: of.SloClasses = [],  # noqa: B006
    long_fraction: of.LongFraction = LONG_FRACTION,
    requests: of.Requests = None,
    seed: of.Seed = 0,
    profile: of.ProfileName = of.DEFAULT_PROFILE,
    decode_profile: of.DecodeProfile = "",
    prefill: of.Prefill = 4,
    decode: of.Decode = 2,
    mixed: of.Mixed = 0,
    kvp: of.Kvp = 0,
    spp: of.Spp = 1,
    failure: of.Failures = [],  # noqa: B006
    errors: of.Errors = [],  # noqa: B006
    slow: of.Slow = [],  # noqa: B006
    autoscale: of.Autoscale = [],  # noqa: B006
    settings: of.Settings = [],  # noqa: B006
    json: of.Json = None,
    board: Annotated[
        Path | None,
        typer.Option(
            "--board", metavar="FOLDER", help="Write a.jsonl and b.jsonl for `millrace board`."
        ),
    ] = None,
) -> None:
    """Simulate two systems on the same requests, and show what changes from A to B."""
    given = dict(locals())
    from millrace.cli.sim.studies.compare_run import run_compare

    run_compare(given)
