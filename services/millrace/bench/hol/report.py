"""Prints the results of `millrace bench hol` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.bench.hol.traffic import GOAL
from millrace.sim.results.plots import Panel, draw_panels

Document = Mapping[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    console.print(_classes(document))
    console.print(_goodput(document))
    console.print(_at_edge(document))
    for name, one in document["goodput"].items():
        for run in one["runs"]:
            for error, count in run["errors"].items():
                console.print(f"[red]{name} at {run['rate_rps']:.3g}/s: {count} x {error}[/red]")
    console.print(_blocking(document))
    checks = document["checks"]
    console.print(
        f"Checks at operators: a prefill of {checks['tokens']} tokens takes {checks['cost']:+.2%} "
        f"(CPU time {checks['cpu_cost']:+.2%}) longer through the pool than bare "
        f"({1e3 * checks['bare_s']:.1f} ms, median of {checks['rounds']} rounds)\n"
    )
    console.print(_interrupted(document))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _classes(document: Document) -> Table:
    table = _table(
        "Classes: TTFT alone, and the objective, ms",
        *("class", "mean tokens", "alone", "times", "objective"),
    )
    for name, one in document["classes"].items():
        table.add_row(
            name,
            str(one["mean_tokens"]),
            f"{one['isolated_ms']:.1f}",
            f"{one['multiple']:.1f}",
            f"{one['objective_ms']:.0f}",
        )
    return table


def _goodput(document: Document) -> Table:
    settings = document["settings"]
    table = _table(
        f"Goodput: highest rate tried with {GOAL:.0%} in time, {settings['requests']} requests",
        *("system", "live 1/s", "over fcfs", "simulated 1/s", "over fcfs", "drift"),
    )
    table.caption = "drift: a text's TTFT alone on this stack over the first one's"
    table.caption_justify = "left"
    for name, one in document["goodput"].items():
        table.add_row(
            name,
            _rate(one["live_rps"]),
            _times(one["live_ratio"]),
            _rate(one["simulated_rps"]),
            _times(one["simulated_ratio"]),
            f"{one['isolated_drift']:.2f}",
        )
    return table


def _at_edge(document: Document) -> Table:
    classes = list(document["classes"])
    table = _table("In time at the live goodput, %", "system", *classes)
    for name, one in document["goodput"].items():
        shares = one["by_class_at_edge"]
        table.add_row(name, *(f"{100 * shares[c]:.0f}" if c in shares else "" for c in classes))
    return table


def _blocking(document: Document) -> Table:
    table = _table(
        f"Blocking: signal to effect in a prefill of {document['settings']['blocking_tokens']} "
        "tokens, ms, beside the longest operator",
        *("stops after", "pass", "n", "median", "mean", "p99", "longest", "operator"),
    )
    for one in document["blocking"]:
        figures = ("median_ms", "mean_ms", "p99_ms", "longest_ms", "longest_operator_ms")
        table.add_row(
            one["granularity"],
            str(one["chunk_tokens"]),
            str(one["signals"]),
            *(f"{one[figure]:.2f}" for figure in figures),
        )
    return table


def _interrupted(document: Document) -> Table:
    settings = document["settings"]
    table = _table(
        f"TTFT of a short prompt that arrives while one of {settings['long_tokens']} tokens is "
        "computed, ms",
        *("system", "n", "alone", "median", "longest", "over alone"),
    )
    for name, one in document["interrupted"].items():
        table.add_row(
            name,
            str(len(one["ttft_ms"])),
            f"{one['isolated_ms']:.1f}",
            f"{one['median_ms']:.1f}",
            f"{max(one['ttft_ms']):.1f}",
            f"{one['ratio']:.2f}",
        )
    return table


def _rate(rate_rps: float) -> str:
    return f"{rate_rps:.2f}" if rate_rps else "none"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: attainment by rate, live and simulated; by class live, one chart per system."""
    goodput = document["goodput"]
    rows = [
        [
            _attainment("live", goodput, "runs", "live_rps"),
            _attainment("simulated", goodput, "simulated_runs", "simulated_rps"),
            _blocking_panel(document),
        ],
        [_by_class(name, one, list(document["classes"])) for name, one in goodput.items()],
    ]
    draw_panels(rows, path)


def _attainment(title: str, goodput: Document, runs: str, edge: str) -> Panel:
    return Panel(
        title=f"all requests, {title}",
        x="request rate (1/s)",
        y="TTFT attainment (%)",
        lines={
            name: [(run["rate_rps"], 100 * run["total"]) for run in _first_seed(one[runs])]
            for name, one in goodput.items()
        },
        log_x=True,
        mark=100 * GOAL,
        edges={name: one[edge] for name, one in goodput.items() if one[edge]},
    )


def _by_class(system: str, one: Document, classes: list[str]) -> Panel:
    runs = _first_seed(one["runs"])
    return Panel(
        title=f"{system}, live",
        x="request rate (1/s)",
        y="TTFT attainment (%)",
        lines={
            name: [
                (run["rate_rps"], 100 * run["by_class"][name])
                for run in runs
                if name in run["by_class"]
            ]
            for name in classes
        },
        mark=100 * GOAL,
        edges={},
    )


def _blocking_panel(document: Document) -> Panel:
    found = {f"{one['granularity']} {one['chunk_tokens']}": one for one in document["blocking"]}
    return Panel(
        title="blocking time",
        x="share of signals (%)",
        y="signal to effect (ms)",
        lines={
            name: [(10 * number, ms) for number, ms in enumerate(one["deciles_ms"])]
            for name, one in found.items()
        },
        log_y=True,
    )


def _first_seed(runs: Sequence[Document]) -> list[Document]:
    return [run for run in runs if run["seed"] == runs[0]["seed"]]
