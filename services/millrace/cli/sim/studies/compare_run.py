"""Simulates two systems on one workload, for `millrace sim compare`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.cli.sim.asked import bar, document
from millrace.cli.sim.options import AXES, build_systems
from millrace.cli.sim.run_once import board_file
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError, reason_of
from millrace.sim.results.report import write_json
from millrace.sim.scenario import Scenario
from millrace.sim.studies.compare import Comparison, compare
from millrace.tables import Output, table

#: Requests in the table of the largest differences.
MOST_SHOWN = 10


def run_compare(given: dict[str, Any]) -> None:
    """Runs both systems of `given`, the command's options; prints and writes the result."""
    a, b = (_system(given, text) for text in (given["a"], given["b"]))
    console = Output()
    folder: Path | None = given["board"]
    if folder is not None:
        _make(folder)
    with ExitStack() as stack:
        boards = tuple(
            None if folder is None else stack.enter_context(board_file(folder / name, one)).write
            for name, one in (("a.jsonl", a), ("b.jsonl", b))
        )
        progress = stack.enter_context(bar(console, "requests", a.traffic.count()))
        found = compare(a, b, progress, boards)
    print_comparison(found, (given["a"], given["b"]), console)
    if given["json"] is not None:
        write_json(given["json"], document("compare", given, a) | {"results": asdict(found)})


def _make(folder: Path) -> None:
    """Makes the folder of --board, unless it is there. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--board {folder}: {reason_of(error)}") from error


def _system(given: dict[str, Any], text: str) -> Scenario:
    """Returns the scenario of one system. Raises ConfigError for a text that names none."""
    defaults = SchedulerConfig()
    axes = {name: getattr(defaults, name) for name in AXES}
    for part in text.split(","):
        axis, equals, value = part.partition("=")
        if not equals:
            axis, value = "policy", part
        if axis not in axes:
            raise ConfigError(f"{text!r}: {axis!r} is no axis; there are {', '.join(AXES)}")
        axes[axis] = value
    [scenario] = build_systems(given, {name: [value] for name, value in axes.items()}).values()
    return scenario


def print_comparison(found: Comparison, names: tuple[str, str], console: Console) -> None:
    """Prints both systems' figures, what changes by class, and the largest differences."""
    console.print(
        table(
            "Both systems",
            "system | in time | goodput/s | TTFT p50 ms | p99 ms | TBT p99 ms | preemptions",
            "{name} | {attainment:.1%} | {goodput_rps:.2f} | {ttft_s[p50]:ms,.0f} | "
            "{ttft_s[p99]:ms,.0f} | {tbt_s[p99]:ms,.1f} | {preemptions?:,}",
            (
                {
                    "name": f"{letter}: {name}",
                    "preemptions": None if one.engine is None else one.engine.preemptions,
                    **asdict(one.total),
                }
                for letter, name, one in zip("AB", names, found.reports, strict=True)
            ),
            left=1,
        )
    )
    console.print(
        table(
            "What changes from A to B, in requests",
            "class | n | both in time | only A | only B | earlier in A | earlier in B | TTFT B/A",
            "{name} | {requests:,} | {both_met:,} | {only_a_met:,} | {only_b_met:,} | "
            "{earlier_in_a:,} | {earlier_in_b:,} | {median_ratio?:.2f}",
            ({"name": name, **asdict(one)} for name, one in found.classes.items()),
            left=1,
        )
    )
    console.print(
        table(
            "Largest differences",
            "request | class | tokens | TTFT in A ms | in B ms | B is earlier by ms",
            "r{index} | {class_name} | {input_tokens:,} | {a_s?:ms,.0f} | {b_s?:ms,.0f} | "
            "{gain_s:ms,.0f}",
            (
                {
                    **asdict(pair),
                    "a_s": pair.ttft_s[0],
                    "b_s": pair.ttft_s[1],
                    "gain_s": pair.gain_s,
                }
                for pair in found.largest(MOST_SHOWN)
                if pair.gain_s
            ),
            left=2,
        )
    )
