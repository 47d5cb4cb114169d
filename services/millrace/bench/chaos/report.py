"""Prints the results of `millrace bench chaos` as tables and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Panel, draw_panels
from millrace.tables import table

Document = dict[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints the ends of all answers, the recovery from each kind of fault, and leaks."""
    ends = ", ".join(f"{count} {end}" for end, count in document["ends"].items())
    console.print(
        f"{document['requests']} requests, {document['tokens']} tokens, {document['faults']} "
        f"faults: {ends}; {len(document['leaks'])} leaks"
    )
    console.print(
        f"On the way: {document['breaks']} broken connections, {document['refusals']} refusals, "
        f"{sum(document['interruptions'].values())} events after which a stream is resumed"
    )
    rows = [
        {
            "name": name,
            "count": len(found),
            "never": found.count(None),
            "median_s": statistics.median(known),
            "most_s": max(known),
        }
        for name, found in sorted(document["recoveries_s"].items())
        if (known := [one for one in found if one is not None])
    ]
    made = table(
        "Seconds from a fault, or from the end of a stop, until a request is answered",
        "fault | n | median | longest | not at all",
        "{name} | {count} | {median_s:.2f} | {most_s:.2f} | {never}",
        rows,
        left=1,
    )
    console.print(made)
    for end, details in document["examples"].items():
        for detail in details:
            console.print(f"{end}: {detail}", markup=False, highlight=False)
    for leak in document["leaks"]:
        console.print(f"leak: {leak}", markup=False, highlight=False)


def draw(document: Document, path: Path) -> None:
    """Writes a PNG over time: answers by their end, their longest pauses, and recoveries."""
    answers = document["answers"]
    kinds = [end for end, count in document["ends"].items() if count]
    totals = {end: _counted([a["ended_s"] for a in answers if a["end"] == end]) for end in kinds}
    pauses = sorted((a["ended_s"], a["longest_pause_s"]) for a in answers if a["end"] == "right")
    recoveries = {
        name: [
            (one["at_s"], one["recovery_s"])
            for one in document["struck"]
            if one["name"] == name and one["recovery_s"] is not None
        ]
        for name in sorted(document["recoveries_s"])
    }
    draw_panels(
        [
            [
                Panel("answers so far", "s", "answers", totals),
                Panel("longest pause of right answers", "s", "s", {"pause": pauses}),
                Panel("recovery", "s, of the fault", "s", recoveries),
            ]
        ],
        path,
    )


def _counted(times_s: list[float]) -> list[tuple[float, float]]:
    return [(at_s, float(number)) for number, at_s in enumerate(sorted(times_s), start=1)]
