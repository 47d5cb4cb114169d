"""Prints the results of `millrace bench cdsp` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels, lines_by
from millrace.tables import table

#: Tetris section 7.4: the most that cache balancing added, and the mean that transfers added.
PAPER_BALANCING, PAPER_HANDSHAKE = 0.018, 0.021
#: As a share of bare NIXL writes of the same bytes.
RING_GOAL = 0.8

Document = dict[str, Any]


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    if "sp" in document:
        for made in _sp(document["sp"]):
            console.print(made)
        _print_handshake(document["handshake"], console)
    if "balancing" in document:
        made = table(
            f"Cache balancing: a chunk after moves over the same without (paper: "
            f"{PAPER_BALANCING:.1%} at most)",
            "history | chunk | instances | moves, ms | without, ms | overhead | waits",
            "{history} | {tokens} | {from} to {to} | {moved_s:ms.1f} | {still_s:ms.1f} | "
            "{overhead:+.1%} | {wait_share:.2%}",
            document["balancing"],
        )
        console.print(made)
    if "ring" in document:
        made = table(
            f"Ring exchange over bare NIXL writes (goal {RING_GOAL})",
            "members | block MiB | ours GB/s | bare GB/s | ratio",
            "{members} | {block_bytes:MiB.0f} | {bytes_per_s:GB.2f} | {bare_bytes_per_s:GB.2f} | "
            "{ratio:.2f}",
            document["ring"],
        )
        console.print(made)
    if "load" in document:
        console.print(_load(document["load"]))


def _sp(rows: Sequence[Document]) -> list[Table]:
    """Makes a table as Tetris Table 1, with one line per degree and one column per length; then the
    parts of the leader's TTFT, and the work of all members.
    """
    lengths = sorted({row["tokens"] for row in rows})
    names = [f"{tokens} tokens" for tokens in lengths]
    by_sp: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_sp.setdefault(row["sp"], {"sp": row["sp"]})[f"{row['tokens']} tokens"] = {
            "speedup": None,
            **row,
        }
    own = [
        row | {"own_s": row["compute_s"] - row["ring_wait_s"] - row["history_wait_s"]}
        for row in rows
    ]
    return [
        table(
            "TTFT, ms (over one instance's)",
            " | ".join(["SP", *map(str, lengths)]),
            " | ".join(["{sp}", *(f"{{{n}[ttft_s]:ms.0f}} ({{{n}[speedup]:.2f}})" for n in names)]),
            [by_sp[sp] for sp in sorted(by_sp)],
        ),
        table(
            "Of the leader's TTFT, ms; landing: until decode has all K/V",
            "tokens | SP | start | compute | ring wait | history | landing",
            "{tokens} | {sp} | {start_s:ms.1f} | {own_s:ms.1f} | {ring_wait_s:ms.1f} | "
            "{history_wait_s:ms.1f} | {landing_s:ms.1f}",
            own,
        ),
        table(
            "All members together; more than one instance does for the prompt",
            "tokens | SP | compute, ms | more | CPU, ms | more | ring MiB",
            "{tokens} | {sp} | {members_s:ms.0f} | {compute_overhead?:+.1%} | {cpu_s:ms.0f} | "
            "{cpu_overhead?:+.1%} | {ring_bytes:MiB.1f}",
            rows,
        ),
    ]


def _print_handshake(found: Document, console: Console) -> None:
    console.print(
        f"Handshakes take {found['handshake_mean']:.1%} of TTFT on average "
        f"({found['handshake_most']:.1%} at most), beside compute. From the first token until "
        f"decode has all K/V: {found['landing_mean']:.1%} ({found['landing_most']:.1%}); the "
        f"paper's transfers {PAPER_HANDSHAKE:.1%} on average\n"
    )


def _load(load: Document) -> Table:
    return table(
        f"TTFT under load, {load['instances']} prefill instances, over that of cdsp",
        "load | planner | mean, ms | p99, ms | mean | p99 | sim mean, ms | mean | p99",
        "{load:.0%} | {planner} | {live[mean_s]:ms.0f} | {live[p99_s]:ms.0f} | "
        "{live[mean_ratio]:.2f} | {live[p99_ratio]:.2f} | {sim[mean_s]:ms.0f} | "
        "{sim[mean_ratio]:.2f} | {sim[p99_ratio]:.2f}",
        (
            {"load": run["load"], "planner": name, "live": own, "sim": run["simulated"][name]}
            for run in load["runs"]
            for name, own in run["live"].items()
        ),
    )


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: TTFT by degree and its parts, balancing, TTFT under load."""
    panels = []
    if "sp" in document:
        panels += _sp_panels(document["sp"])
    if "balancing" in document:
        rows = [row | {"share": row["history"] / row["tokens"]} for row in document["balancing"]]
        lines = lines_by(rows, "{from} to {to}", "share", "overhead", 100)
        balancing = ("cache balancing", "history over the chunk", "overhead (%)")
        panels.append(Panel(*balancing, lines, mark=100 * PAPER_BALANCING))
    if "load" in document:
        panels.append(_load_panel(document["load"]))
    draw_panels([panels[i : i + 2] for i in range(0, len(panels), 2)], path)


def _sp_panels(rows: Sequence[Document]) -> list[Panel]:
    waits = [
        row | {"waits": (row["ring_wait_s"] + row["history_wait_s"]) / row["compute_s"]}
        for row in rows
    ]
    ttft = lines_by(rows, "SP {sp}", "tokens", "ttft_s", 1e3)
    waiting = lines_by(waits, "SP {sp}", "tokens", "waits", 100)
    x = "prompt (tokens)"
    return [
        Panel("TTFT", x, "ms", ttft, log_x=True, log_y=True),
        Panel("waits of the leader, of its compute", x, "%", waiting, log_x=True),
    ]


def _load_panel(load: Document) -> Panel:
    lines = {}
    for planner in load["runs"][0]["live"]:
        for side, name in (("live", planner), ("simulated", f"{planner}, simulated")):
            lines[name] = [
                (100 * run["load"], 1e3 * run[side][planner]["mean_s"]) for run in load["runs"]
            ]
    return Panel("mean TTFT under load", "load (%)", "ms", lines)
