"""Prints the results of `millrace bench chaos` as tables and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.bench.chaos.faults import KILL, STOP
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
    """Writes a PNG: answers by their end over time; and, as shares, the longest pauses of the right
    ones and the recoveries from each fault.
    """
    answers = document["answers"]
    ended = list(zip(answers["ended_s"], answers["end"], answers["longest_pause_s"], strict=True))
    kinds = [end for end, count in document["ends"].items() if count]
    totals = {kind: _counted([at_s for at_s, end, _ in ended if end == kind]) for kind in kinds}
    pauses = [pause_s for _, end, pause_s in ended if end == "right"]
    panels = [
        Panel("answers so far", "s", "answers", totals),
        Panel("longest pause of a right answer", "s", "% of them", {"": _shares(pauses)}),
    ]
    for kind in (KILL, STOP):
        found = {
            name.removeprefix(f"{kind} "): _shares([one for one in times if one is not None])
            for name, times in sorted(document["recoveries_s"].items())
            if name.startswith(kind)
        }
        panels.append(Panel(f"recovery from a {kind}", "s", "% of them", found))
    draw_panels([panels], path)


def _counted(times_s: list[float]) -> list[tuple[float, float]]:
    return [(at_s, float(number)) for number, at_s in enumerate(sorted(times_s), start=1)]


def _shares(times_s: list[float]) -> list[tuple[float, float]]:
    """Returns each time with the share of all that are at most as long, in percent."""
    return [(time_s, 100.0 * number / len(times_s)) for time_s, number in _counted(times_s)]
