"""Simulates one system on one workload, for `millrace sim run`."""

from __future__ import annotations

import json as json_lines
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.cli.sim.asked import bar, document
from millrace.cli.sim.options import AXES, build_systems, parse_range
from millrace.cli.sim.tables import print_report
from millrace.core.board.events import Head
from millrace.core.board.files import BoardFile
from millrace.core.errors import ConfigError, reason_of
from millrace.sim.results.plots import draw_board, draw_run
from millrace.sim.results.report import RequestRecord, write_json
from millrace.sim.results.timeline import Timeline
from millrace.sim.scenario import Scenario, Watch, simulate
from millrace.tables import Output


def run_once(given: dict[str, Any]) -> None:
    """Runs the simulation of `given`, the command's options; prints and writes the result."""
    records, gantt, board = given["records"], given["gantt"], given["board"]
    json, plot = given["json"], given["plot"]
    found = build_systems(given, {name: [given[name]] for name in AXES})
    scenario = next(iter(found.values()))
    console = Output()
    with ExitStack() as stack:
        watch = Watch(
            sink=None if records is None else stack.enter_context(_record_sink(records)),
            board=None if board is None else stack.enter_context(board_file(board, scenario)).write,
            timeline=None if gantt is None else _timeline(given["gantt_window"]),
            progress=stack.enter_context(bar(console, "requests", scenario.traffic.count())),
        )
        report = simulate(scenario, watch)
    print_report(report, console)
    if json is not None:
        write_json(json, document("run", given, scenario) | {"results": report.to_json()})
    if plot is not None:
        draw_run(report, plot)
    if gantt is not None and watch.timeline is not None:
        draw_board(watch.timeline.blocks, gantt)


def board_file(path: Path, scenario: Scenario) -> BoardFile:
    """Opens the board's file of a run. Raises BoardError."""
    scheduler, spec = scenario.spec.scheduler, scenario.spec
    title = f"{spec.profile.name}: {scheduler.policy}, {scheduler.planner}"
    return BoardFile(path, Head(source="simulation", title=title))


def _timeline(window: str) -> Timeline:
    start_s, end_s = parse_range(window, "--gantt-window")
    return Timeline(start_s=start_s, end_s=end_s)


@contextmanager
def _record_sink(path: Path) -> Iterator[Callable[[RequestRecord], None]]:
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--records {path}: {reason_of(error)}") from error
    with file:
        yield lambda record: print(json_lines.dumps(asdict(record)), file=file)
