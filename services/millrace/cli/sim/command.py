"""`millrace sim`: policies and planners on simulated clusters, on real traces or on mixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.process import plain_errors
from millrace.cli.sim import arguments as of
from millrace.cli.sim.fit_command import fit_command
from millrace.cli.sim.replay_command import command as replay_command
from millrace.cli.sim.studies.compare_command import compare_command
from millrace.cli.sim.studies.rates_command import rates_command
from millrace.cli.sim.studies.sweep_command import sweep_command
from millrace.experiments import EXPERIMENTS, load_experiment
from millrace.file_options import WRITE
from millrace.sim.workload.mixes import LONG_FRACTION


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("run")(run)
    app.command("compare")(compare_command)
    app.command("sweep")(sweep_command)
    app.command("replay")(replay_command)
    app.command("profile-rates")(rates_command)
    app.command("fit")(fit_command)
    names = ", ".join(EXPERIMENTS)
    app.command("paper", help=f"Run one of the papers' experiments: {names}.")(paper)


@plain_errors()
def run(  # noqa: PLR0913 - every option of the command line is a parameter
    trace: of.Trace = None,
    mix: of.MixName = "",
    window: of.Window = "",
    rate: of.Rate = None,
    rate_scale: of.RateScale = 1.0,
    slo_scale: of.SloScale = 1.0,
    slo_class: of.SloClasses = [],  # noqa: B006 - typer wants a literal default
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
    policy: Annotated[str, typer.Option("--policy", help=of.POLICY_HELP)] = of.DEFAULTS.policy,
    planner: Annotated[str, typer.Option("--planner", help=of.PLANNER_HELP)] = of.DEFAULTS.planner,
    preemption: Annotated[
        str, typer.Option("--preemption", help=of.PREEMPTION_HELP)
    ] = of.DEFAULTS.preemption,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", help=of.BATCH_HELP)
    ] = of.DEFAULTS.batch_tokens,
    settings: of.Settings = [],  # noqa: B006
    json: of.Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PATH", help="PNG: TTFT's CDF and attainment by class.", **WRITE
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="PATH", help="JSON lines: one per request.", **WRITE),
    ] = None,
    board: Annotated[
        Path | None,
        typer.Option(
            "--board",
            metavar="PATH",
            help="JSON lines (.gz: packed) for `millrace board PATH`.",
            **WRITE,
        ),
    ] = None,
    gantt: Annotated[
        Path | None,
        typer.Option("--gantt", metavar="PATH", help="PNG: instances over time.", **WRITE),
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


@plain_errors()
def paper(
    name: Annotated[str, typer.Argument(help="Name of the experiment.")],
    json: of.Json = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="PNG.", **WRITE)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer requests, for a quick result.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE|FOLDER",
            help="A trace; of millrace-policies and -systems the folder of their traces.",
            exists=True,
            readable=True,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="PATH",
            help="JSON file that keeps what is computed. What it has is not computed again.",
            **WRITE,
        ),
    ] = None,
) -> None:

    from millrace.tables import Output

    load_experiment(name, trace=trace, resume=resume).run(Output(), json, plot, quick)
