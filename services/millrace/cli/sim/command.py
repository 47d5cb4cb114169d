"""`millrace sim`: policies and planners on simulated clusters, on real traces or on mixes."""

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
from millrace.cli.sim.rates_command import rates_command
from millrace.cli.sim.replay_command import command as replay_command
from millrace.cli.sim.sweep_command import sweep_command
from millrace.experiments import EXPERIMENTS, load_experiment, load_traced
from millrace.sim.workload.mixes import LONG_FRACTION


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("run")(run)
    app.command("sweep")(sweep_command)
    app.command("replay")(replay_command)
    app.command("profile-rates")(rates_command)
    names = ", ".join(EXPERIMENTS)
    app.command("paper", help=f"Run one of the papers' experiments: {names}.")(paper)


@plain_errors
def run(  # noqa: PLR0913 - every option of the command line is a parameter
    trace: Trace = None,
    mix: MixName = "",
    window: Window = "",
    rate: Rate = None,
    rate_scale: RateScale = 1.0,
    slo_scale: SloScale = 1.0,
    slo_class: SloClasses = [],  # noqa: B006 - typer wants a literal default
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
    policy: Annotated[str, typer.Option("--policy", help=POLICY_HELP)] = DEFAULTS.policy,
    planner: Annotated[str, typer.Option("--planner", help=PLANNER_HELP)] = DEFAULTS.planner,
    preemption: Annotated[
        str, typer.Option("--preemption", help=PREEMPTION_HELP)
    ] = DEFAULTS.preemption,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", help=BATCH_HELP)
    ] = DEFAULTS.batch_tokens,
    settings: Settings = [],  # noqa: B006
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="PNG: TTFT's CDF and attainment by class."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="PATH", help="JSON lines: one per request."),
    ] = None,
    gantt: Annotated[
        Path | None,
        typer.Option("--gantt", metavar="PATH", help="PNG: instances over time."),
    ] = None,
    gantt_window: Annotated[
        str,
        typer.Option(
            "--gantt-window", metavar="START_S:END_S", help="Simulated time span of --gantt."
        ),
    ] = "0:60",
) -> None:
    """Simulate one system on one workload: TTFT, TBT, attainment, goodput, engine counters.

    Equal options give equal bytes in every file.
    """
    given = dict(locals())
    from millrace.cli.sim.run_once import run_once

    run_once(given)


@plain_errors
def paper(
    name: Annotated[str, typer.Argument(help="Name of the experiment.")],
    json: Json = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PATH", help="PNG.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer requests, for a quick result.")
    ] = False,
    trace: Trace = None,
) -> None:

    from rich.console import Console

    if trace is None:
        load_experiment(name).run(Console(), json, plot, quick)
    else:
        load_traced(name).run(Console(), json, plot, quick, trace)
