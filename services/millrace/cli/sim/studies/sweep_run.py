"""Finds the largest load that systems can carry, for `millrace sim sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.cli.sim.asked import document, progress
from millrace.cli.sim.options import AXES, build_systems, parse_numbers
from millrace.cli.sim.tables import print_sweep
from millrace.core.errors import ConfigError
from millrace.sim.results.plots import Panel, draw_panels
from millrace.sim.results.report import write_json
from millrace.sim.scenario import Scenario
from millrace.sim.studies.sweep import Axis, SweepOptions, SystemResult, sweep
from millrace.tables import Output


def run_sweep(given: dict[str, Any]) -> None:
    """Runs the sweep of `given`, the command's options; prints and writes the result."""
    json, plot = given["json"], given["plot"]
    compared = build_systems(given, {name: given[name] for name in AXES})
    first = next(iter(compared.values()))
    options = _sweep_options(given, first)
    console = Output()
    with _runs_bar(console) as advance:
        found = sweep(compared, options, advance)
    print_sweep(found, options, console, is_replayed=first.traffic.is_replayed)
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
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in found:
        shares = {value: report.total.attainment for value, report in result.curve}
        if result.edge is not None and result.at_edge is not None:
            shares[result.edge] = result.at_edge.total.attainment
        lines[result.name] = [(load, 100 * share) for load, share in sorted(shares.items())]
    label = "scale of the trace's rate" if scenario.traffic.is_replayed else "request rate (1/s)"
    if options.axis == "slo-scale":
        label = "SLO scale (1: as given)"
    y = "requests within their objectives (%)"
    draw_panels([[Panel("", label, y, lines, mark=100 * options.goal)]], path, (6.6, 4.2))


@contextmanager
def _runs_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    with progress(console) as shown:
        bar = shown.add_task("runs", total=None, note="")
        yield lambda system, value: shown.update(bar, advance=1, note=f"{system} at {value:.4g}")
