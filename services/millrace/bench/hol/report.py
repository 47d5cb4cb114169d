"""Prints the results of `millrace bench hol` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.bench.hol.systems import FCFS
from millrace.bench.hol.traffic import CLASS_GOAL, GOAL
from millrace.sim.results.plots import Panel, draw_panels, points
from millrace.tables import table

Document = dict[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    goodput = document["goodput"]
    for made in (_classes(document), *_goodput(document)):
        console.print(made)
    for name, one in goodput.items():
        for run in one["runs"]:
            for error, count in run["errors"].items():
                console.print(f"[red]{name} at {run['rate_rps']:.3g}/s: {count} x {error}[/red]")
    console.print(_bounds(document))
    console.print(_blocking(document))
    checks = document["checks"]
    console.print(
        f"Checks at operators: a prefill of {checks['tokens']} tokens takes {checks['cost']:+.2%} "
        f"(CPU time {checks['cpu_cost']:+.2%}) longer through the pool than bare "
        f"({1e3 * checks['bare_s']:.1f} ms, median of {checks['rounds']} rounds)\n"
    )
    console.print(_interrupted(document))


def _bounds(document: Document) -> str:
    bounds = document["bounds_rps"]
    base = document["goodput"].get(FCFS, {}).get("live_rps")
    over = {name: f" ({rps / base:.2f} times fcfs)" if base else "" for name, rps in bounds.items()}
    return (
        f"A file's prefill takes {document['file_over_text']:.1f} times a text's (11 in the "
        f"paper). No order of whole prompts on an instance with a core of its own carries more "
        f"than {bounds['all']:.2f}/s{over['all']}, or {bounds['every_class']:.2f}/s"
        f"{over['every_class']} with {CLASS_GOAL:.0%} of every class\n"
    )


def _named(found: Mapping[str, Document]) -> list[dict[str, Any]]:
    return [{"name": name, **one} for name, one in found.items()]


def _classes(document: Document) -> Table:
    return table(
        "Classes: TTFT alone, and the objective, ms",
        "class | mean tokens | alone | times | objective",
        "{name} | {mean_tokens} | {isolated_ms:.1f} | {multiple:.1f} | {objective_ms:.0f}",
        _named(document["classes"]),
        left=1,
    )


def _goodput(document: Document) -> list[Table]:
    classes, rows = list(document["classes"]), _named(document["goodput"])
    for row in rows:
        row |= {
            f"{side} rate": f"{row[f'{side}_rps']:.2f}" if row[f"{side}_rps"] else "none"
            for side in ("live", "simulated", "simulated_every_class")
        }
        row |= {f"share of {name}": share for name, share in row["by_class_at_edge"].items()}
    return [
        table(
            f"Goodput: highest rate tried with {GOAL:.0%} in time, "
            f"at least {document['settings']['requests']} requests",
            "system | live 1/s | over fcfs | simulated 1/s | over fcfs | every class 1/s | "
            "over fcfs | drift",
            "{name} | {live rate} | {live_ratio:.2f} | {simulated rate} | "
            "{simulated_ratio:.2f} | {simulated_every_class rate} | "
            "{simulated_every_class_ratio:.2f} | {isolated_drift:.2f}",
            rows,
            left=1,
            caption=f"every class: simulated, with {CLASS_GOAL:.0%} of each class in time; "
            "drift: a text's TTFT alone on this stack over the first one's",
        ),
        table(
            "In time at the live goodput, %",
            " | ".join(["system", *classes]),
            "{name}" + "".join(f" | {{share of {name}?:%.0f}}" for name in classes),
            rows,
            left=1,
        ),
    ]


def _blocking(document: Document) -> Table:
    return table(
        f"Blocking: signal to effect in a prefill of {document['settings']['blocking_tokens']} "
        "tokens, ms, beside the longest operator",
        "stops after | pass | n | median | mean | p99 | longest | operator",
        "{granularity} | {chunk_tokens} | {signals} | {median_ms:.2f} | {mean_ms:.2f} | "
        "{p99_ms:.2f} | {longest_ms:.2f} | {longest_operator_ms:.2f}",
        document["blocking"],
        left=1,
    )


def _interrupted(document: Document) -> Table:
    rows = [
        one | {"n": len(one["ttft_ms"]), "longest_ms": max(one["ttft_ms"])}
        for one in _named(document["interrupted"])
    ]
    return table(
        f"TTFT of a short prompt that arrives while one of {document['settings']['long_tokens']} "
        "tokens is computed, ms",
        "system | n | alone | median | longest | over alone",
        "{name} | {n} | {isolated_ms:.1f} | {median_ms:.1f} | {longest_ms:.1f} | {ratio:.2f}",
        rows,
        left=1,
    )


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
        f"all requests, {title}",
        "request rate (1/s)",
        "TTFT attainment (%)",
        {
            name: points(_first_seed(one[runs]), "rate_rps", "total", 100)
            for name, one in goodput.items()
        },
        log_x=True,
        mark=100 * GOAL,
        edges={name: one[edge] for name, one in goodput.items() if one[edge]},
    )


def _by_class(system: str, one: Document, classes: list[str]) -> Panel:
    runs = _first_seed(one["runs"])
    return Panel(
        f"{system}, live",
        "request rate (1/s)",
        "TTFT attainment (%)",
        {
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
        "blocking time",
        "share of signals (%)",
        "signal to effect (ms)",
        {
            name: [(10 * number, ms) for number, ms in enumerate(one["deciles_ms"])]
            for name, one in found.items()
        },
        log_y=True,
    )


def _first_seed(runs: Sequence[Document]) -> list[Document]:
    return [run for run in runs if run["seed"] == runs[0]["seed"]]
