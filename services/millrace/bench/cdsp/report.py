"""Prints the results of `millrace bench cdsp` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels

#: Tetris section 7.5: the most that cache balancing added, and the mean that transfers added.
PAPER_BALANCING, PAPER_HANDSHAKE = 0.018, 0.021
#: As a share of bare NIXL writes of the same bytes.
RING_GOAL = 0.8

Document = Mapping[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    if "sp" in document:
        console.print(_ttft(document["sp"]))
        console.print(_parts(document["sp"]))
        console.print(_work(document["sp"]))
        _print_handshake(document["handshake"], console)
    if "balancing" in document:
        console.print(_balancing(document["balancing"]))
    if "ring" in document:
        console.print(_ring(document["ring"]))
    if "load" in document:
        console.print(_load(document["load"]))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _ttft(rows: Sequence[Document]) -> Table:
    """Makes a table as Tetris Table 1: one line per degree, one column per length."""
    lengths = sorted({row["tokens"] for row in rows})
    table = _table("TTFT, ms (over one instance's)", "SP", *map(str, lengths))
    by_case = {(row["sp"], row["tokens"]): row for row in rows}
    for sp in sorted({row["sp"] for row in rows}):
        cells = []
        for tokens in lengths:
            row = by_case[sp, tokens]
            cells.append(f"{1e3 * row['ttft_s']:.0f} ({_times(row.get('speedup'))})")
        table.add_row(str(sp), *cells)
    return table


def _parts(rows: Sequence[Document]) -> Table:
    table = _table(
        "Of the leader's TTFT, ms; landing: until decode has all K/V",
        *("tokens", "SP", "start", "compute", "ring wait", "history", "landing"),
    )
    for row in rows:
        figures = (
            row["start_s"],
            row["compute_s"] - row["ring_wait_s"] - row["history_wait_s"],
            row["ring_wait_s"],
            row["history_wait_s"],
            row["landing_s"],
        )
        table.add_row(
            str(row["tokens"]), str(row["sp"]), *(f"{1e3 * seconds:.1f}" for seconds in figures)
        )
    return table


def _work(rows: Sequence[Document]) -> Table:
    table = _table(
        "All members together; more than one instance does for the prompt",
        *("tokens", "SP", "compute, ms", "more", "CPU, ms", "more", "ring MiB"),
    )
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            str(row["sp"]),
            f"{1e3 * row['members_s']:.0f}",
            _percent(row.get("compute_overhead")),
            f"{1e3 * row['cpu_s']:.0f}",
            _percent(row.get("cpu_overhead")),
            f"{row['ring_bytes'] / 2**20:.1f}",
        )
    return table


def _print_handshake(found: Document, console: Console) -> None:
    console.print(
        f"Handshakes take {found['handshake_mean']:.1%} of TTFT on average "
        f"({found['handshake_most']:.1%} at most), beside compute. From the first token until "
        f"decode has all K/V: {found['landing_mean']:.1%} ({found['landing_most']:.1%}); the "
        f"paper's transfers {PAPER_HANDSHAKE:.1%} on average\n"
    )


def _balancing(rows: Sequence[Document]) -> Table:
    table = _table(
        f"Cache balancing: a chunk after moves over the same without (paper: "
        f"{PAPER_BALANCING:.1%} at most)",
        *("history", "chunk", "instances", "moves, ms", "without, ms", "overhead", "waits"),
    )
    for row in rows:
        table.add_row(
            str(row["history"]),
            str(row["tokens"]),
            f"{row['from']} to {row['to']}",
            f"{1e3 * row['moved_s']:.1f}",
            f"{1e3 * row['still_s']:.1f}",
            _percent(row["overhead"]),
            f"{row['wait_share']:.2%}",
        )
    return table


def _ring(rates: Sequence[Document]) -> Table:
    table = _table(
        f"Ring exchange over bare NIXL writes (goal {RING_GOAL})",
        *("members", "block MiB", "ours GB/s", "bare GB/s", "ratio"),
    )
    for rate in rates:
        table.add_row(
            str(rate["members"]),
            f"{rate['block_bytes'] / 2**20:.0f}",
            f"{rate['bytes_per_s'] / 1e9:.2f}",
            f"{rate['bare_bytes_per_s'] / 1e9:.2f}",
            f"{rate['ratio']:.2f}",
        )
    return table


def _load(load: Document) -> Table:
    table = _table(
        f"TTFT under load, {load['instances']} prefill instances, over that of cdsp",
        *("load", "planner", "mean, ms", "p99, ms", "mean", "p99", "sim mean, ms", "mean", "p99"),
    )
    for run in load["runs"]:
        for planner, own in run["live"].items():
            in_sim = run["simulated"][planner]
            table.add_row(
                f"{run['load']:.0%}",
                planner,
                f"{1e3 * own['mean_s']:.0f}",
                f"{1e3 * own['p99_s']:.0f}",
                f"{own['mean_ratio']:.2f}",
                f"{own['p99_ratio']:.2f}",
                f"{1e3 * in_sim['mean_s']:.0f}",
                f"{in_sim['mean_ratio']:.2f}",
                f"{in_sim['p99_ratio']:.2f}",
            )
    return table


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: TTFT by degree and its parts, balancing, TTFT under load."""
    panels = []
    if "sp" in document:
        panels += [_ttft_panel(document["sp"]), _wait_panel(document["sp"])]
    if "balancing" in document:
        panels.append(_balancing_panel(document["balancing"]))
    if "load" in document:
        panels.append(_load_panel(document["load"]))
    draw_panels([panels[i : i + 2] for i in range(0, len(panels), 2)], path)


def _by_degree(rows: Sequence[Document]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for row in rows:
        found.setdefault(f"SP {row['sp']}", []).append(row)
    return found


def _ttft_panel(rows: Sequence[Document]) -> Panel:
    return Panel(
        title="TTFT",
        x="prompt (tokens)",
        y="ms",
        lines={
            name: [(row["tokens"], 1e3 * row["ttft_s"]) for row in own]
            for name, own in _by_degree(rows).items()
        },
        log_x=True,
        log_y=True,
    )


def _wait_panel(rows: Sequence[Document]) -> Panel:
    return Panel(
        title="waits of the leader, of its compute",
        x="prompt (tokens)",
        y="%",
        lines={
            name: [
                (
                    row["tokens"],
                    100 * (row["ring_wait_s"] + row["history_wait_s"]) / row["compute_s"],
                )
                for row in own
            ]
            for name, own in _by_degree(rows).items()
        },
        log_x=True,
    )


def _balancing_panel(rows: Sequence[Document]) -> Panel:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        line = lines.setdefault(f"{row['from']} to {row['to']}", [])
        line.append((row["history"] / row["tokens"], 100 * row["overhead"]))
    return Panel(
        title="cache balancing",
        x="history over the chunk",
        y="overhead (%)",
        lines=lines,
        mark=100 * PAPER_BALANCING,
    )


def _load_panel(load: Document) -> Panel:
    lines = {}
    for planner in load["runs"][0]["live"]:
        for side, name in (("live", planner), ("simulated", f"{planner}, simulated")):
            lines[name] = [
                (100 * run["load"], 1e3 * run[side][planner]["mean_s"]) for run in load["runs"]
            ]
    return Panel(title="mean TTFT under load", x="load (%)", y="ms", lines=lines)
