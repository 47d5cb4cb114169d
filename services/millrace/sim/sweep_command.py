"""`millrace sim sweep`: the edge of what systems carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
from millrace.sim.options import parse_numbers
from millrace.sim.plots import Curve, draw_attainment
from millrace.sim.report import write_json
from millrace.sim.scenario import Scenario
from millrace.sim.sweep import Axis, SweepOptions, SystemResult, sweep
from millrace.sim.tables import print_sweep

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
            "--axis", help="What changes: rate (of a replayed trace: its scale) or slo-scale."
        ),
    ] = "rate",
    goal: Annotated[float, typer.Option("--goal", help="Attainment to hold, 0 to 1.")] = 0.9,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="The search ends this close, as a share.")
    ] = 0.02,
    at: Annotated[
        str,
        typer.Option("--at", metavar="V,V,...", help="Full runs at these values, for the plot."),
    ] = "",
    search: Annotated[bool, typer.Option(help="Look for the edge.")] = True,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 2,
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PATH", help="PNG: attainment at the values of --at and the edge."
        ),
    ] = None,
) -> None:
    """The largest rate that still meets the goal, or the tightest objectives, by system.

    Every combination of the repeatable options is a system. The search starts at --rate (a replayed
    trace: at --rate-scale), or at --slo-scale; runs stop early once they must fail.
    """
    given = dict(locals())
    compared = systems(given, policy, planner, preemption, batch_tokens)
    first = next(iter(compared.values()))
    options = _sweep_options(given, first)
    console = Console()
    with _runs_bar(console) as told:
        found = sweep(compared, options, told)
    print_sweep(found, options, console)
    if json is not None:
        results = {"systems": [result.to_json() for result in found]}
        write_json(json, document("sweep", given, first) | {"results": results})
    if plot is not None:
        _plot_sweep(found, options, first, plot)


def _sweep_options(given: dict[str, Any], scenario: Scenario) -> SweepOptions:
    axes: dict[str, Axis] = {"rate": "rate", "slo-scale": "slo-scale"}
    if given["axis"] not in axes:
        raise ConfigError(f"--axis {given['axis']!r}: it must be one of {', '.join(axes)}")
    for name, least, most in (("goal", 0.0, 1.0), ("tolerance", 0.0, 1.0)):
        if not least < given[name] <= most:
            raise ConfigError(f"--{name} {given[name]:g}: it must be above {least:g}, at most 1")
    points = parse_numbers(given["at"], "--at")
    if 0.0 in points:
        raise ConfigError(f"--at {given['at']!r}: values must be more than 0")
    if not (given["search"] or points):
        raise ConfigError("--no-search without --at leaves nothing to run")
    if given["plot"] is not None and not points:
        raise ConfigError("--plot draws full runs: it needs their values, by --at")
    traffic = scenario.traffic
    start = traffic.rate_scale if traffic.is_replayed else traffic.rate_rps or 1.0
    return SweepOptions(
        axis=axes[given["axis"]],
        search=given["search"],
        start=traffic.slo_scale if given["axis"] == "slo-scale" else start,
        tolerance=given["tolerance"],
        goal=given["goal"],
        points=points,
        jobs=given["jobs"],
    )


def _plot_sweep(
    found: list[SystemResult], options: SweepOptions, scenario: Scenario, path: Path
) -> None:
    curves = []
    for result in found:
        shares = {value: report.total.attainment for value, report in result.curve}
        if result.edge is not None and result.at_edge is not None:
            shares[result.edge] = result.at_edge.total.attainment
        loads = sorted(shares)
        curves.append(
            Curve(name=result.name, loads=loads, attainments=[shares[load] for load in loads])
        )
    label = "scale of the trace's rate" if scenario.traffic.is_replayed else "request rate (1/s)"
    if options.axis == "slo-scale":
        label = "SLO scale (1: as given)"
    draw_attainment(curves, path, goal=options.goal, label=label)


@contextmanager
def _runs_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    with progress(console) as shown:
        bar = shown.add_task("runs", total=None, note="")
        yield lambda system, value: shown.update(bar, advance=1, note=f"{system} at {value:.4g}")
