"""Prints the results of `millrace bench autoscale` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels

Document = Mapping[str, Any]
Points = list[tuple[float, float]]


def print_tables(document: Document, console: Console) -> None:
    """Prints one line per system, and the decisions of the autoscaled system."""
    phases = [phase["name"] for phase in document["settings"]["phases"]]
    table = Table(
        title=f"First tokens within {document['ttft_slo_s']:.2f} s, % of the requests of a phase",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("prefill instances")
    for heading in (*phases, "all", "TTFT p99, s", "instance-seconds", "of the most"):
        table.add_column(heading, justify="right")
    most_s = document["systems"][-1]["instance_s"]
    for system in document["systems"]:
        found = system["results"]
        table.add_row(
            system["name"],
            *(_attained(found["classes"][name]) for name in phases),
            _attained(found["total"]),
            f"{found['total']['ttft_ms']['p99'] / 1e3:.2f}",
            f"{system['instance_s']:.0f}",
            f"{system['instance_s'] / most_s:.2f}",
        )
    console.print(table)
    for system in document["systems"]:
        for line in system["lines"]:
            console.print(f"  {line}", markup=False, highlight=False)
    console.print(f"None of {document['requests']} requests a system was lost.")


def _attained(found: Document) -> str:
    return f"{100 * found['ttft_attainment']:.0f}" if found["requests"] else ""


def draw(document: Document, path: Path) -> None:
    """Writes a PNG over time: the load, the backlog, instances, and attainment."""
    systems = document["systems"]
    draw_panels(
        [
            [
                Panel(
                    title="load",
                    x="s",
                    y="requests/s",
                    lines={"offered": _points(document["offered"])},
                ),
                Panel(
                    title="backlog",
                    x="s",
                    y="predicted seconds of prefill",
                    lines={s["name"]: _sampled(s["samples"], "backlog_s") for s in systems},
                ),
            ],
            [
                Panel(title="prefill instances", x="s", y="", lines=_sizes(systems)),
                Panel(
                    title="first tokens in time",
                    x="s, when sent",
                    y="%",
                    lines={
                        s["name"]: [(at_s, 100 * share) for at_s, share in s["attainment"]]
                        for s in systems
                    },
                ),
            ],
        ],
        path,
    )


def _sizes(systems: Sequence[Document]) -> dict[str, Points]:
    """Returns the autoscaled system's sizes: recommended, existing, serving."""
    (scaled,) = (system for system in systems if system["decisions"])
    return {
        "recommended": _steps(_points((d["at_s"], d["recommended"]) for d in scaled["decisions"])),
        "processes": _steps(_sampled(scaled["samples"], "processes")),
        "ready": _steps(_sampled(scaled["samples"], "ready")),
    }


def _sampled(samples: Iterable[Document], name: str) -> Points:
    return [(sample["at_s"], sample[name]) for sample in samples if sample[name] is not None]


def _points(pairs: Iterable[Sequence[float]]) -> Points:
    return [(x, y) for x, y in pairs]


def _steps(points: Points) -> Points:
    """Returns steps: each value holds until the next."""
    found: Points = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found
