"""Prints the results of `millrace bench long` as tables and as a picture. Reads the JSON
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels, points
from millrace.tables import table

#: Goals: median error of predictions, and the relative cost of decodes for an iteration.
PREDICTOR_GOAL, BATCHING_GOAL = 0.1, 1.1

Document = dict[str, Any]
Lines = dict[str, list[tuple[float, float]]]

#: Cells of a pass's parts.
_PARTS = "{attention_s:ms.1f} | {communication_s:ms.1f} | {rest_s:ms.1f} | {normalised_s:ms.1f}"


def print_tables(document: Document, console: Console) -> None:
    """Prints all measurements, one table per part."""
    if "predictor" in document:
        _print_predictor(document["predictor"], console)
    for name, made in (("chunking", _chunking), ("batching", _batching), ("spp", _stages)):
        if name in document:
            console.print(made(document[name]))
    if "kvp" in document:
        console.print(_token(document["kvp"]["token"]))
        console.print(_growth(document["kvp"]))


def _print_predictor(found: Document, console: Console) -> None:
    console.print(
        f"Mixed batches predicted: {found['median_error']:.1%} off by the median (goal "
        f"{PREDICTOR_GOAL:.0%}), {found['p90_error']:.1%} at the 90th percentile, of "
        f"{found['batches']} random ones that nothing was fitted to; corrected by those before "
        f"{found['corrected_median_error']:.1%} and {found['corrected_p90_error']:.1%}; the same "
        f"batch again is {found['spread']:.1%} off\n"
    )


def _chunking(found: Document) -> Table:
    return table(
        f"A prompt of {found['prompt_tokens']} tokens beside {found['decodes']} decodes; target: "
        "what the static chunk takes at the end; ratio: static over adaptive",
        "chunks | passes | p50, ms | p99, ms | of target | growth | whole, s | ratio",
        "{name} | {iterations} | {p50_s:ms.1f} | {p99_s:ms.1f} | {p99_over_target:.2f} | "
        "{growth:.2f} | {total_s:.1f} | {over_adaptive?:.2f}",
        [{"name": name, **way} for name, way in found["ways"].items()],
    )


def _batching(found: Document) -> Table:
    each = found["context_tokens"] // found["decodes"]
    kinds = ("same_tokens", "same_chunk")
    rows = [row | {kind: row[kind] / row["alone"] for kind in kinds} for row in found["rows"]]
    return table(
        f"{found['decodes']} decodes of {each} tokens beside a chunk of "
        f"{found['chunk_tokens']}, over the chunk alone (goal {BATCHING_GOAL})",
        "history | alone, ms | same tokens | same chunk",
        "{history} | {alone:ms.1f} | {same_tokens:.3f} | {same_chunk:.3f}",
        [*rows, {"history": "all", "alone": None, **found["whole"]}],
    )


def _stages(found: Document) -> Table:
    return table(
        f"A prompt of {found['prompt_tokens']} tokens in chunks of {found['chunk_tokens']} through "
        f"stages of one thread, on {found['cores']} cores; efficiency: of the cores in use; with "
        "sums: the prompt's time with checksums of activations over that without (one end of a hop "
        f"sums a chunk's rows in {1e6 * found['sum_s']:.0f} us)",
        "stages | prompt, s | chunk, ms | speed-up | efficiency | with sums",
        "{stages} | {prompt_s:.2f} | {chunk_s:ms.1f} | {speedup:.2f} | {efficiency:.2f} | "
        "{checked_over_prompt?:.3f}",
        found["rows"],
    )


def _token(rows: Sequence[Document]) -> Table:
    alone = {row["context"]: row["normalised_s"] for row in rows if row["kvp"] == 1}
    return table(
        "Time between tokens of one request, ms: attention over the largest shard, communication, "
        "the rest; their sum is for workers with cores of their own, clock for all on these",
        "context | KVP | attn | comm | rest | sum | ratio | clock | recorded",
        f"{{context}} | {{kvp}} | {_PARTS} | {{ratio?:.2f}} | {{wall_s:ms.1f}} | "
        "{recorded_s?:ms.1f}",
        (
            {"ratio": row["normalised_s"] / alone[row["context"]], **row}
            if row["context"] in alone
            else row
            for row in rows
        ),
    )


def _growth(found: Document) -> Table:
    rows = found["growth"]
    return table(
        f"A chunk of {found['chunk_tokens']} at the end of a context that grows, ms: workers join "
        f"at {found['most_tokens']} tokens each; alone: the KV owner holds all",
        "context | workers | attn | comm | rest | sum | ratio | clock | alone | ratio",
        f"{{context}} | {{workers}} | {_PARTS} | {{ratio:.2f}} | {{wall_s:ms.1f}} | "
        "{alone_s:ms.1f} | {alone:.2f}",
        (
            row
            | {
                "ratio": row["normalised_s"] / rows[0]["normalised_s"],
                "alone": row["alone_s"] / rows[0]["alone_s"],
            }
            for row in rows
        ),
    )


def draw(document: Document, path: Path) -> None:
    """Writes a PNG: errors, iterations over a prefill, decodes beside it, shards."""
    panels: list[Panel] = []
    for name, made in (
        ("predictor", _error_panels),
        ("chunking", _chunking_panels),
        ("batching", _batching_panels),
        ("spp", _stages_panels),
        ("kvp", _kvp_panels),
    ):
        if name in document:
            panels += made(document[name])
    draw_panels([panels[i : i + 3] for i in range(0, len(panels), 3)], path)


def _error_panels(found: Document) -> list[Panel]:
    lines: Lines = {}
    for name, key in (("by the profile", "error"), ("corrected", "corrected_error")):
        errors = sorted(100 * abs(point[key]) for point in found["points"])
        lines[name] = [(error, 100 * (n + 1) / len(errors)) for n, error in enumerate(errors)]
    labels = ("mixed batches predicted", "error (%)", "batches as near, or nearer (%)")
    return [Panel(*labels, lines, mark=50.0)]


def _chunking_panels(found: Document) -> list[Panel]:
    times: Lines = {}
    chunks: Lines = {}
    for name, way in found["ways"].items():
        times[name] = [(done, 1e3 * seconds) for done, _, seconds in way["points"]]
        chunks[name] = [(done, tokens) for done, tokens, _ in way["points"]]
    x = "prompt tokens done"
    return [
        Panel("iteration, beside decodes", x, "ms", times, log_y=True),
        Panel("chunk", x, "tokens", chunks, log_y=True),
    ]


def _batching_panels(found: Document) -> list[Panel]:
    lines = {
        name: [(row["history"], row[kind] / row["alone"]) for row in found["rows"]]
        for name, kind in (("same tokens", "same_tokens"), ("same chunk", "same_chunk"))
    }
    title = f"{found['decodes']} decodes beside a chunk"
    y = "iteration over the chunk alone"
    return [Panel(title, "history (tokens)", y, lines, mark=BATCHING_GOAL)]


def _stages_panels(found: Document) -> list[Panel]:
    lines = {
        name: points(found["rows"], "stages", kind)
        for name, kind in (("speed-up", "speedup"), ("efficiency", "efficiency"))
    }
    title = f"{found['prompt_tokens']} tokens through stages"
    return [Panel(title, "stages", "over one stage", lines, mark=1.0)]


def _kvp_panels(found: Document) -> list[Panel]:
    rows = found["token"]
    longest = max(row["context"] for row in rows)
    together: Lines = {}
    for row in rows:
        for name, key in (("KVP {kvp}", "normalised_s"), ("KVP {kvp}, shared cores", "wall_s")):
            line = together.setdefault(name.format_map(row), [])
            line += points([row], "context", key, 1e3)
    of_longest = [row for row in rows if row["context"] == longest]
    parts = {
        part: points(of_longest, "kvp", f"{part}_s", 1e3)
        for part in ("attention", "communication", "rest")
    }
    growth = {
        name: points(found["growth"], "context", key, 1e3)
        for name, key in (
            ("workers join", "normalised_s"),
            ("shared cores", "wall_s"),
            ("KV owner alone", "alone_s"),
        )
    }
    x, joining = "context (tokens)", f"chunk of {found['chunk_tokens']} as workers join"
    return [
        Panel("time between tokens", x, "ms", together, log_x=True),
        Panel(f"of a context of {longest}", "KVP", "ms", parts),
        Panel(joining, x, "ms", growth),
    ]
