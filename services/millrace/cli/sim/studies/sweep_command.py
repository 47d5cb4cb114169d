"""`millrace sim sweep`: finds the largest load that systems can carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.cli.sim import arguments as of
from millrace.file_options import WRITE
from millrace.sim.workload.mixes import LONG_FRACTION

Policies = Annotated[list[str], typer.Option("--policy", help=of.POLICY_HELP + " Repeatable.")]
Planners = Annotated[list[str], typer.Option("--planner", help=of.PLANNER_HELP + " Repeatable.")]
Preemptions = Annotated[
    list[str], typer.Option("--preemption", help=of.PREEMPTION_HELP + " Repeatable.")
]
Budgets = Annotated[list[int], typer.Option("--batch-tokens", help=of.BATCH_HELP + " Repeatable.")]


@plain_errors()
def sweep_command(  # noqa: PLR0913
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
    policy: Policies = [of.DEFAULTS.policy],  # noqa: B006
    planner: Planners = [of.DEFAULTS.planner],  # noqa: B006
    preemption: Preemptions = [of.DEFAULTS.preemption],  # noqa: B006
    batch_tokens: Budgets = [of.DEFAULTS.batch_tokens],  # noqa: B006
    settings: of.Settings = [],  # noqa: B006
    axis: Annotated[
        str,
        typer.Option(
            "--axis", help="Swept value: rate (of a replayed trace: its scale) or slo-scale."
        ),
    ] = "rate",
    goal: Annotated[float, typer.Option("--goal", help="Attainment to hold, 0 to 1.")] = 0.9,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Relative error at which the search ends.")
    ] = 0.02,
    at: Annotated[
        str,
        typer.Option("--at", metavar="V,V,...", help="Full runs at these values, for the plot."),
    ] = "",
    search: Annotated[bool, typer.Option(help="Search for the edge.")] = True,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 2,
    json: of.Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="PATH",
            help="PNG: attainment at the values of --at and the edge.",
            **WRITE,
        ),
    ] = None,
) -> None:
    """Find the largest rate that still meets the goal, or the tightest objectives, by system.

    Every combination of the repeatable options is a system. The search starts at --rate (a replayed
    trace: at --rate-scale), or at --slo-scale; runs stop early once they must fail.
    """
    given = dict(locals())
    from millrace.cli.sim.studies.sweep_run import run_sweep

    run_sweep(given)
