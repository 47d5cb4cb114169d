"""Prints the results of `millrace bench overload` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.sim.results.plots import Panel, draw_panels
from millrace.tables import table

Document = dict[str, Any]
Points = list[tuple[float, float]]

ENDS = ("in time", "late", "refused", "failed")
_BIN_S = 2.0


def print_tables(document: Document, console: Console) -> None:
    """Prints the sweep, the figures of the overload, and each service's memory."""
    swept = table(
        f"First tokens within {document['ttft_slo_s']:.2f} s by rate",
        "requests/s | in time, % | goodput, requests/s",
        "{rate_rps:.2f} | {percent:.0f} | {goodput_rps:.2f}",
        [one | {"percent": 100 * one["attainment"]} for one in document["sweep"]],
        left=0,
    )
    console.print(swept)
    factor, ends = document["settings"]["factor"], document["ends"]
    console.print(
        f"{document['peak_load']:.2f} and {factor:g} times {document['sustained_rps']:.2f} "
        "requests/s in turns: " + ", ".join(f"{ends[end]} {end}" for end in ENDS if ends.get(end))
    )
    columns = "phase | served | in time | goodput, requests/s | ran, % | waited for a core, %"
    line = "{phase} | {served} | {in_time} | {goodput_rps:.2f} | {ran_percent} | {waited_percent}"
    rows = [_turn(one) for one in document["turns"]]
    console.print(table("First tokens, and prefill's compute thread", columns, line, rows, left=1))
    by_turn = ", ".join(_ratio(one) for one in document["over_peak_by_turn"])
    console.print(
        f"goodput {document['goodput_rps']:.2f} requests/s, {_ratio(document['over_peak'])} of the "
        f"peak of {document['peak_goodput_rps']:.2f} (by turn: {by_turn}); per second of prefill's "
        f"compute {_ratio(document['over_peak_per_compute'])} of the peak"
    )
    refused, lag = document["refusal_ms"], document["send_lag_ms"]
    console.print(
        f"{refused['count']} refusals within {refused['p50']:.0f} ms (median), "
        f"{refused['p99']:.0f} ms (p99); this client's own timers were late by "
        f"{lag['p50']:.0f} ms and {lag['p99']:.0f} ms"
    )
    console.print(_recovery(document))
    rows = [
        {"name": name, "first": a, "last": b} for name, (a, b) in document["memory_mib"].items()
    ]
    columns = "service | first quarter | last quarter"
    line = "{name} | {first:.0f} | {last:.0f}"
    console.print(table("Memory in the turns, MiB", columns, line, rows, left=1))


def _turn(turn: Document) -> Document:
    return turn | {
        "goodput_rps": turn["in_time"] / turn["seconds"],
        "ran_percent": _percent(turn["ran"]),
        "waited_percent": _percent(turn["waited"]),
    }


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f}"


def _ratio(found: float | None) -> str:
    return "?" if found is None else f"{found:.2f}"


def _recovery(document: Document) -> str:
    recovery_s, drain_s = document["recovery_s"], document["drain_s"]
    waiting = f"{document['waiting']} requests wait at its end"
    if drain_s is None or recovery_s is None:
        return f"{waiting}; first tokens are not in time again"
    return (
        f"{waiting}, served in {drain_s:.1f} s; first tokens are in time again after "
        f"{recovery_s:.1f} s"
    )


def draw(document: Document, path: Path) -> None:
    """Writes a PNG over time: requests by their end, and memory."""
    requests = document["requests"]
    kinds = [end for end in ENDS if document["ends"].get(end)]
    by_end = {
        end: _rates([one["sent_s"] for one in requests if one["end"] == end]) for end in kinds
    }
    names = sorted({name for one in document["samples"] for name in one["memory_mib"]})
    memory = {
        name: [
            (one["at_s"], one["memory_mib"][name])
            for one in document["samples"]
            if name in one["memory_mib"]
        ]
        for name in names
    }
    draw_panels(
        [
            [
                Panel("requests by their end", "s, when sent", "requests/s", by_end),
                Panel("memory", "s", "MiB", memory),
            ]
        ],
        path,
    )


def _rates(times_s: Sequence[float]) -> Points:
    """Returns how many a second, by the middle of each bin."""
    counts: dict[int, int] = {}
    for at_s in times_s:
        place = int(at_s // _BIN_S)
        counts[place] = counts.get(place, 0) + 1
    bins = range(max(counts, default=0) + 1)
    return [((place + 0.5) * _BIN_S, counts.get(place, 0) / _BIN_S) for place in bins]
