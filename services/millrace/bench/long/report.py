"""Prints the results of `millrace bench long` as tables and as a picture. Reads the JSON
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

#: Goals: median error of predictions, and the relative cost of decodes for an iteration.
PREDICTOR_GOAL, BATCHING_GOAL = 0.1, 1.1

Document = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    if "predictor" in document:
        _print_predictor(document["predictor"], console)
    if "chunking" in document:
        console.print(_chunking(document["chunking"]))
    if "batching" in document:
        console.print(_batching(document["batching"]))
    if "spp" in document:
        console.print(_stages(document["spp"]))
    if "kvp" in document:
        console.print(_token(document["kvp"]["token"]))
        console.print(_growth(document["kvp"]))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_predictor(found: Document, console: Console) -> None:
    console.print(
        f"Mixed batches predicted: {found['median_error']:.1%} off by the median (goal "
        f"{PREDICTOR_GOAL:.0%}), {found['p90_error']:.1%} at the 90th percentile, of "
        f"{found['batches']} random ones that nothing was fitted to; corrected by those before "
        f"{found['corrected_median_error']:.1%} and {found['corrected_p90_error']:.1%}; the same "
        f"batch again is {found['spread']:.1%} off\n"
    )


def _chunking(found: Document) -> Table:
    table = _table(
        f"A prompt of {found['prompt_tokens']} tokens beside {found['decodes']} decodes; target: "
        "what the static chunk takes at the end; ratio: static over adaptive",
        *("chunks", "passes", "p50, ms", "p99, ms", "of target", "growth"),
        *("whole, s", "ratio"),
    )
    for name, way in found["ways"].items():
        table.add_row(
            name,
            str(way["iterations"]),
            _ms(way["p50_s"]),
            _ms(way["p99_s"]),
            f"{way['p99_over_target']:.2f}",
            f"{way['growth']:.2f}",
            f"{way['total_s']:.1f}",
            f"{way['over_adaptive']:.2f}" if "over_adaptive" in way else "",
        )
    return table


def _batching(found: Document) -> Table:
    each = found["context_tokens"] // found["decodes"]
    table = _table(
        f"{found['decodes']} decodes of {each} tokens beside a chunk of "
        f"{found['chunk_tokens']}, over the chunk alone (goal {BATCHING_GOAL})",
        *("history", "alone, ms", "same tokens", "same chunk"),
    )
    for row in found["rows"]:
        table.add_row(
            str(row["history"]),
            _ms(row["alone"]),
            f"{row['same_tokens'] / row['alone']:.3f}",
            f"{row['same_chunk'] / row['alone']:.3f}",
        )
    whole = found["whole"]
    table.add_row("all", "", f"{whole['same_tokens']:.3f}", f"{whole['same_chunk']:.3f}")
    return table


def _stages(found: Document) -> Table:
    table = _table(
        f"A prompt of {found['prompt_tokens']} tokens in chunks of {found['chunk_tokens']} through "
        f"stages of one thread, on {found['cores']} cores; efficiency: of the cores in use",
        *("stages", "prompt, s", "chunk, ms", "speed-up", "efficiency"),
    )
    for row in found["rows"]:
        table.add_row(
            str(row["stages"]),
            f"{row['prompt_s']:.2f}",
            _ms(row["chunk_s"]),
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.2f}",
        )
    return table


def _token(rows: Sequence[Document]) -> Table:
    table = _table(
        "Time between tokens of one request, ms: attention over the largest shard, communication, "
        "the rest; their sum is for workers with cores of their own, clock for all on these",
        *("context", "KVP", "attn", "comm", "rest", "sum", "ratio", "clock", "recorded"),
    )
    alone = {row["context"]: row["normalised_s"] for row in rows if row["kvp"] == 1}
    for row in rows:
        table.add_row(
            str(row["context"]),
            str(row["kvp"]),
            *_parts(row),
            _over(row["normalised_s"], alone.get(row["context"])),
            _ms(row["wall_s"]),
            _ms(row["recorded_s"]) if "recorded_s" in row else "",
        )
    return table


def _growth(found: Document) -> Table:
    table = _table(
        f"A chunk of {found['chunk_tokens']} at the end of a context that grows, ms: workers join "
        f"at {found['most_tokens']} tokens each; alone: the KV owner holds all",
        *("context", "workers", "attn", "comm", "rest", "sum", "ratio", "clock", "alone", "ratio"),
    )
    rows = found["growth"]
    for row in rows:
        table.add_row(
            str(row["context"]),
            str(row["workers"]),
            *_parts(row),
            _over(row["normalised_s"], rows[0]["normalised_s"]),
            _ms(row["wall_s"]),
            _ms(row["alone_s"]),
            _over(row["alone_s"], rows[0]["alone_s"]),
        )
    return table


def _parts(row: Document) -> list[str]:
    names = ("attention_s", "communication_s", "rest_s", "normalised_s")
    return [_ms(row[name]) for name in names]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _over(seconds: float, first_s: float | None) -> str:
    return "" if first_s is None else f"{seconds / first_s:.2f}"


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: errors, iterations over a prefill, decodes beside it, shards."""
    panels = []
    if "predictor" in document:
        panels.append(_error_panel(document["predictor"]))
    if "chunking" in document:
        panels += _chunking_panels(document["chunking"])
    if "batching" in document:
        panels.append(_batching_panel(document["batching"]))
    if "spp" in document:
        panels.append(_stages_panel(document["spp"]))
    if "kvp" in document:
        panels += [*_token_panels(document["kvp"]["token"]), _growth_panel(document["kvp"])]
    draw_panels([panels[i : i + 3] for i in range(0, len(panels), 3)], path)


def _error_panel(found: Document) -> Panel:
    lines: Lines = {}
    for name, key in (("by the profile", "error"), ("corrected", "corrected_error")):
        errors = sorted(100 * abs(point[key]) for point in found["points"])
        shares = [100 * (number + 1) / len(errors) for number in range(len(errors))]
        lines[name] = list(zip(errors, shares, strict=True))
    return Panel(
        title="mixed batches predicted",
        x="error (%)",
        y="batches as near, or nearer (%)",
        lines=lines,
        mark=50.0,
    )


def _chunking_panels(found: Document) -> list[Panel]:
    times: Lines = {}
    chunks: Lines = {}
    for name, way in found["ways"].items():
        times[name] = [(done, 1e3 * seconds) for done, _, seconds in way["points"]]
        chunks[name] = [(done, tokens) for done, tokens, _ in way["points"]]
    return [
        Panel(
            title="iteration, beside decodes",
            x="prompt tokens done",
            y="ms",
            lines=times,
            log_y=True,
        ),
        Panel(title="chunk", x="prompt tokens done", y="tokens", lines=chunks, log_y=True),
    ]


def _batching_panel(found: Document) -> Panel:
    return Panel(
        title=f"{found['decodes']} decodes beside a chunk",
        x="history (tokens)",
        y="iteration over the chunk alone",
        lines={
            name: [(row["history"], row[kind] / row["alone"]) for row in found["rows"]]
            for name, kind in (("same tokens", "same_tokens"), ("same chunk", "same_chunk"))
        },
        mark=BATCHING_GOAL,
    )


def _stages_panel(found: Document) -> Panel:
    rows = found["rows"]
    return Panel(
        title=f"{found['prompt_tokens']} tokens through stages",
        x="stages",
        y="over one stage",
        lines={
            "speed-up": [(row["stages"], row["speedup"]) for row in rows],
            "efficiency": [(row["stages"], row["efficiency"]) for row in rows],
        },
        mark=1.0,
    )


def _token_panels(rows: Sequence[Document]) -> list[Panel]:
    together: Lines = {}
    parts: Lines = {}
    longest = max(row["context"] for row in rows)
    for row in rows:
        name = f"KVP {row['kvp']}"
        together.setdefault(name, []).append((row["context"], 1e3 * row["normalised_s"]))
        on_clock = together.setdefault(f"{name}, shared cores", [])
        on_clock.append((row["context"], 1e3 * row["wall_s"]))
        if row["context"] == longest:
            for part in ("attention", "communication", "rest"):
                parts.setdefault(part, []).append((row["kvp"], 1e3 * row[f"{part}_s"]))
    return [
        Panel(
            title="time between tokens", x="context (tokens)", y="ms", lines=together, log_x=True
        ),
        Panel(title=f"of a context of {longest}", x="KVP", y="ms", lines=parts),
    ]


def _growth_panel(found: Document) -> Panel:
    rows = found["growth"]
    return Panel(
        title=f"chunk of {found['chunk_tokens']} as workers join",
        x="context (tokens)",
        y="ms",
        lines={
            "workers join": [(row["context"], 1e3 * row["normalised_s"]) for row in rows],
            "shared cores": [(row["context"], 1e3 * row["wall_s"]) for row in rows],
            "KV owner alone": [(row["context"], 1e3 * row["alone_s"]) for row in rows],
        },
    )
