"""Measures a profile's errors: on held-out rows of its own tables, and on other sources' data.

Held out: each inner point of a table's grid is predicted from all other points; for GEMMs, each
shape beside the layer's is predicted from the other shapes. The shipped tables keep all points.
Measurements of other sources enter no fit; their errors contain the difference of two testbeds as
well as the model's error.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression, median

from millrace.core.cost.operators import BatchShape, OperatorModel, Table
from millrace.core.cost.profile import Profile
from millrace.profiles.calibration import KVP_RATIOS, ring
from millrace.profiles.eq_1 import Points, rounded
from millrace.profiles.measured import Device, refined, rows, table, vidur_layer


def _without(full: Table, xs: Container[float]) -> Table:
    left = [(x, y) for x, y in zip(full.xs, full.ys, strict=True) if x not in xs]
    return Table(xs=tuple(x for x, _ in left), ys=tuple(y for _, y in left))


def held_out(full: Table) -> list[float]:
    """Returns the relative error at each inner point of a table, predicted from the others."""
    return [_without(full, (x,)).at(x) / full.at(x) - 1.0 for x in full.xs[1:-1]]


def _median(values: Iterable[float]) -> float:
    return rounded(median(map(abs, values)))


def errors(
    device: Device,
    gemms: Mapping[str, tuple[int, int]],
    tp: int,
    attn: Table,
    operators: OperatorModel,
) -> dict[str, float]:
    """Returns the median relative error on held-out measurements, by table, and of whole prefills.

    attn: prefill attention as measured. The GEMMs' errors are over shapes. prefill: of passes at a
    token count that every table leaves out, against the pass computed from the measurements.
    """
    found = {name: _median(device.shape_errors(n, k)) for name, (n, k) in gemms.items()}
    found["attn"] = _median(
        refined(_without(attn, (x,))).at(x) / attn.at(x) - 1.0 for x in attn.xs[1:-1]
    )
    # The last point of a row is extrapolated, not measured.
    decode = [_without(row, row.xs[-1:]) for row in operators.decode_attn.tables]
    found["decode_attn"] = _median(error for row in decode for error in held_out(row))
    if tp > 1:
        found["all_reduce"] = _median(held_out(table(device.all_reduce(tp))))
    found["prefill"] = _median(_prefill_errors(attn, operators))
    return found


def _prefill_errors(attn: Table, operators: OperatorModel) -> list[float]:
    grid = set(operators.qkv_proj.xs) & {x**0.5 for x in attn.xs}
    whole = replace(operators, attn=refined(attn))
    found = []
    for x in sorted(grid)[1:-1]:
        rest = replace(
            operators,
            qkv_proj=_without(operators.qkv_proj, (x,)),
            o_proj=_without(operators.o_proj, (x,)),
            gate_up_proj=_without(operators.gate_up_proj, (x,)),
            down_proj=_without(operators.down_proj, (x,)),
            attn=refined(_without(attn, (x * x,))),
        )
        found.append(prefill_s(rest, int(x)) / prefill_s(whole, int(x)) - 1.0)
    return found


def checks(source: Path, profile: Profile, table_1: Mapping[int, Points]) -> dict[str, float]:
    """Returns the median relative difference from measurements of other sources, where they
    exist.
    """
    found: dict[str, list[float]] = {}
    if profile.name == "llama3-8b-a100-tp1":
        found["table_1_sp1"] = [
            prefill_s(profile.operators, tokens) / seconds - 1.0 for tokens, seconds in table_1[1]
        ]
        one = profile.prefill.by_sp[1]
        found["table_1_ring_model"] = [
            ring(one, sp, profile.layers, profile.ring_step_s).chunk_s(tokens) / seconds - 1.0
            for sp in (2, 4, 8, 16)
            for tokens, seconds in table_1[sp]
        ]
        found["vidur_history"] = _vidur_history(source, profile.operators)
    if profile.name == "llama3-8b-h100-tp8":
        found["kvp_ratios"] = [
            profile.operators.decode_step_s(1, context, kvp)
            / profile.operators.decode_step_s(1, context)
            / ratio
            - 1.0
            for context, kvp, ratio in KVP_RATIOS
        ]
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        # The last point is extrapolated here, too.
        full: Table = getattr(profile.operators, name)
        found[f"{name}_between_tokens"] = held_out(_without(full, full.xs[-1:]))
    found["history"], found["history_chunk_below_512"] = _history(source, profile.operators)
    found["vidur_layer"] = _vidur(source, profile)
    prompt, token = _splitwise(source, profile)
    found["splitwise_prompt"], found["splitwise_token"] = prompt, token
    found["eq_1_to_operators"] = [
        profile.prefill.chunk_s(tokens) / prefill_s(profile.operators, tokens) - 1.0
        for tokens in (700, 1500, 3000, 6000, 12000, 24000, 48000, 96000)
    ]
    return {name: _median(values) for name, values in found.items() if values}


def prefill_s(operators: OperatorModel, tokens: int) -> float:
    """Returns the seconds of a whole prompt in one pass."""
    return operators.pass_s(BatchShape(prefills=((tokens, 0),)))


def _history(source: Path, operators: OperatorModel) -> tuple[list[float], list[float]]:
    """Returns errors of attention over history on an RTX PRO 6000: of long chunks, of short chunks.

    The profile's rule is applied to that GPU's own table without history (32 / 8 heads).
    """
    alone: dict[float, float] = {}
    with_history = []
    for row in rows(source / "llmservingsim_rtxpro6000_llama31-8b_tp1_attention.csv.gz"):
        tokens, history = int(row["prefill_chunk"]), int(row["kv_prefill"])
        if row["n_decode"] != "0" or not tokens:
            continue
        seconds = float(row["time_us"]) * 1e-6
        if history:
            with_history.append((tokens, history, seconds))
        else:
            alone[float(tokens**2)] = seconds
    attn = table(alone)
    found: tuple[list[float], list[float]] = ([], [])
    for tokens, history, seconds in with_history:
        pairs = 2.0 * operators.history_factor.at(tokens) * tokens * history
        guess = attn.at(tokens**2) + attn.slopes[-1] * pairs
        found[tokens < 512].append(guess / seconds - 1.0)
    return found


def _vidur_history(source: Path, operators: OperatorModel) -> list[float]:
    """Returns errors of a (query, history) pair's time on A100 with 32 heads per rank, chunks from
    1k on.

    Vidur's rows of one chunk length lie on a line over the history; its slope is compared.
    """
    by_chunk: dict[int, list[tuple[float, float]]] = {}
    for row in rows(source / "vidur_a100_llama2-70b_tp2_attention_4k.csv.gz"):
        tokens, history = int(row["prefill_chunk_size"]), int(row["kv_cache_size"])
        if row["is_prefill"] == "True" and tokens >= 1024 and history:
            seconds = float(row["time_stats.attn_prefill.median"]) * 1e-3
            by_chunk.setdefault(tokens, []).append((history, seconds))
    found = []
    for tokens, points in by_chunk.items():
        histories, seconds_at = zip(*points, strict=True)
        if len(set(histories)) >= 8:
            measured_s = linear_regression(histories, seconds_at).slope / tokens
            ours_s = 2.0 * operators.history_factor.at(tokens) * operators.attn.slopes[-1]
            found.append(ours_s / measured_s - 1.0)
    return found


def _vidur(source: Path, profile: Profile) -> list[float]:
    """Returns errors of a layer's GEMMs and element-wise kernels (no attention, no all-reduce), TP
    1 only.
    """
    if profile.name != "llama3-8b-a100-tp1":
        return []
    layer = vidur_layer(source, "a100_llama3-8b", 1)
    operators = (
        *("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act"),
        *("input_layernorm", "post_attention_layernorm", "attn_rope", "add", "add"),
    )
    ours = profile.operators
    parts = (ours.qkv_proj, ours.o_proj, ours.gate_up_proj, ours.down_proj)
    lengths = [m for m in layer["add"] if m <= 16384]
    return [
        sum(part.at(m) for part in parts) / sum(layer[op][m] for op in operators) - 1.0
        for m in lengths
    ]


def _splitwise(source: Path, profile: Profile) -> tuple[list[float], list[float]]:
    """Returns errors of prompt and token times of Llama-2-70B, with Llama-3-70B's layers, batch 1
    to 64.
    """
    hardware = f"{profile.device}-80gb"
    prompts, tokens = [], []
    for row in rows(source / "splitwise_perf_model.csv.gz"):
        if profile.model != "llama3-70b" or row["model"] != "llama2-70b":
            continue
        if row["hardware"] != hardware or row["tensor_parallel"] != str(profile.tp):
            continue
        prompt, batch = int(row["prompt_size"]), int(row["batch_size"])
        shape = BatchShape(prefills=((prompt, 0),) * batch)
        prompts.append(profile.operators.pass_s(shape) * 1e3 / float(row["prompt_time"]) - 1.0)
        context = batch * (prompt + int(row["token_size"]) // 2)
        step_s = profile.operators.decode_step_s(batch, context)
        tokens.append(step_s * 1e3 / float(row["token_time"]) - 1.0)
    return prompts, tokens
