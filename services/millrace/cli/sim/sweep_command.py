"""`millrace sim sweep`: finds the largest load that systems can carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.sim.arguments import (
    BATCH_HELP,
    DEFAULT_PROFILE,
    DEFAULTS,
    PLANNER_HELP,
    POLICY_HELP,
    PREEMPTION_HELP,
    Autoscale,
    Decode,
    DecodeProfile,
    Failures,
    Json,
    Kvp,
    LongFraction,
    Mixed,
    MixName,
    Prefill,
    ProfileName,
    Rate,
    RateScale,
    Requests,
    Seed,
    Settings,
    SloClasses,
    SloScale,
    Spp,
    Trace,
    Window,
    plain_errors,
)
from millrace.sim.workload.mixes import LONG_FRACTION

Policies = Annotated[list[str], typer.Option("--policy", help=POLICY_HELP + " Repeatable.")]
Planners = Annotated[list[str], typer.Option("--planner", help=PLANNER_HELP + " Repeatable.")]
Preemptions = Annotated[
    list[str], typer.Option("--preemption", help=PREEMPTION_HELP + " Repeatable.")
]
Budgets = Annotated[list[int], typer.Option("--batch-tokens", help=BATCH_HELP + " Repeatable.")]


@plain_errors
def sweep_command(  # noqa: PLR0913
    trace: Trace = None,
    mix: MixName = "",
    window: Window = "",
    rate: Rate = None,
    rate_scale: RateScale = 1.0,
    slo_scale: SloScale = 1.0,
    slo_class: SloClasses = [],  # noqa: B006
    long_fraction: LongFraction = LONG_FRACTION,
    requests: Requests = None,
    seed: Seed = 0,
    profile: ProfileName = DEFAULT_PROFILE,
    decode_profile: DecodeProfile = "",
    prefill: Prefill = 4,
    decode: Decode = 2,
    mixed: Mixed = 0,
    kvp: Kvp = 0,
    spp: Spp = 1,
    failure: Failures = [],  # noqa: B006
    autoscale: Autoscale = [],  # noqa: B006
    policy: Policies = [DEFAULTS.policy],  # noqa: B006
    planner: Planners = [DEFAULTS.planner],  # noqa: B006
    preemption: Preemptions = [DEFAULTS.preemption],  # noqa: B006
    batch_tokens: Budgets = [DEFAULTS.batch_tokens],  # noqa: B006
    settings: Settings = [],  # noqa: B006
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
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PATH", help="PNG: attainment at the values of --at and the edge."
        ),
    ] = None,
) -> None:
    """Find the largest rate that still meets the goal, or the tightest objectives, by system.

    Every combination of the repeatable options is a system. The search starts at --rate (a replayed
    trace: at --rate-scale), or at --slo-scale; runs stop early once they must fail.
    """
    given = dict(locals())
    from millrace.cli.sim.sweep_run import run_sweep

    run_sweep(given)
