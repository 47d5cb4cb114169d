"""Prints the results of `millrace bench autoscale` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Panel, draw_panels
from millrace.tables import table

Document = dict[str, Any]
Points = list[tuple[float, float]]


def print_tables(document: Document, console: Console) -> None:
    """Prints one line per system, and the decisions of the autoscaled system."""
    phases = [phase["name"] for phase in document["settings"]["phases"]]
    most_s = document["systems"][-1]["instance_s"]
    rows = [
        one
        | {
            "share": one["instance_s"] / most_s,
            "p99_s": one["results"]["total"]["ttft_ms"]["p99"] / 1e3,
            "in time": {
                name: _attained(found)
                for name, found in [
                    ("all", one["results"]["total"]),
                    *one["results"]["classes"].items(),
                ]
            },
        }
        for one in document["systems"]
    ]
    columns = [*phases, "all"]
    made = table(
        f"First tokens within {document['ttft_slo_s']:.2f} s, % of the requests of a phase",
        f"prefill instances | {' | '.join(columns)} | TTFT p99, s | instance-seconds | of the most",
        "{name} | "
        + "".join(f"{{in time[{name}]}} | " for name in columns)
        + "{p99_s:.2f} | {instance_s:.0f} | {share:.2f}",
        rows,
        left=1,
    )
    console.print(made)
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
                Panel("load", "s", "requests/s", {"offered": _points(document["offered"])}),
                Panel(
                    "backlog",
                    "s",
                    "predicted seconds of prefill",
                    {s["name"]: _sampled(s["samples"], "backlog_s") for s in systems},
                ),
            ],
            [
                Panel("prefill instances", "s", "", _sizes(systems)),
                Panel(
                    "first tokens in time",
                    "s, when sent",
                    "%",
                    {
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
