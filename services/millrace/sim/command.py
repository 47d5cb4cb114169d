"""`millrace sim`: policies and planners on simulated clusters, on real traces or on mixes."""

from __future__ import annotations

import json as json_lines
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from millrace.core.errors import ConfigError
from millrace.sim.arguments import (
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
    document,
    plain_errors,
    progress,
    systems,
)
from millrace.sim.mixes import LONG_FRACTION
from millrace.sim.options import parse_range
from millrace.sim.papers import EXPERIMENTS, load_experiment, load_traced
from millrace.sim.plots import draw_board, draw_run
from millrace.sim.rates_command import rates_command
from millrace.sim.replay import command as replay_command
from millrace.sim.report import RequestRecord, write_json
from millrace.sim.scenario import Watch, simulate
from millrace.sim.sweep_command import sweep_command
from millrace.sim.tables import print_report
from millrace.sim.timeline import Timeline


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("run")(run)
    app.command("sweep")(sweep_command)
    app.command("replay")(replay_command)
    app.command("profile-rates")(rates_command)
    names = ", ".join(EXPERIMENTS) or "none yet"
    app.command("paper", help=f"One of the papers' experiments: {names}.")(paper)


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
        typer.Option("--records", metavar="PATH", help="JSON lines: one request each."),
    ] = None,
    gantt: Annotated[
        Path | None,
        typer.Option("--gantt", metavar="PATH", help="PNG: instances over time."),
    ] = None,
    gantt_window: Annotated[
        str,
        typer.Option("--gantt-window", metavar="START_S:END_S", help="Simulated time it shows."),
    ] = "0:60",
) -> None:
    """Simulates one system on one workload: TTFT, TBT, attainment, goodput, what the engine did.

    Equal options give equal bytes in every file.
    """
    given = dict(locals())
    found = systems(given, [policy], [planner], [preemption], [batch_tokens])
    scenario = next(iter(found.values()))
    console = Console()
    with ExitStack() as stack:
        watch = Watch(
            sink=None if records is None else stack.enter_context(_record_sink(records)),
            timeline=None if gantt is None else _timeline(gantt_window),
            progress=stack.enter_context(_bar(console, "requests", scenario.traffic.count())),
        )
        report = simulate(scenario, watch)
    print_report(report, console)
    if json is not None:
        write_json(json, document("run", given, scenario) | {"results": report.to_json()})
    if plot is not None:
        draw_run(report, plot)
    if gantt is not None and watch.timeline is not None:
        draw_board(watch.timeline.blocks, gantt)


@plain_errors
def paper(
    name: Annotated[str, typer.Argument(help="Which one.")],
    json: Json = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PATH", help="PNG.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests, for a look.")] = False,
    trace: Trace = None,
) -> None:
    if trace is None:
        load_experiment(name).run(Console(), json, plot, quick)
    else:
        load_traced(name).run(Console(), json, plot, quick, trace)


def _timeline(window: str) -> Timeline:
    start_s, end_s = parse_range(window, "--gantt-window")
    return Timeline(start_s=start_s, end_s=end_s)


@contextmanager
def _record_sink(path: Path) -> Iterator[Callable[[RequestRecord], None]]:
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--records {path}: {error}") from error
    with file:
        yield lambda record: print(json_lines.dumps(asdict(record)), file=file)


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int, float], None]]:
    with progress(console) as shown:
        bar = shown.add_task(what, total=total, note="")

        def told(ended: int, now_s: float) -> None:
            shown.update(bar, completed=ended, note=f"simulated {now_s:,.0f} s")

        yield told
