"""Fits the predictor of mixed batches to measured passes (Medha section 4.3).

A mixed pass is a ragged batch: its linear layers treat all rows alike; its attention is the sum of
its chunks' and its decodes' attention. So the tables are fitted to passes of chunks alone and to
passes of decodes alone, timed at operator boundaries; passes of both measure the error. Differences
from `fitting.operator_model`: decodes are rows of a pass that runs operator by operator, not a
recorded step; attention is the operator's own time; costs once per pass (planning, the embedding)
are overhead_s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.profiler.measure import Measured, Prefill, Rows
from millrace.profiler.tables import over_squares, table_of, with_far
from millrace.profiler.workload import AROUND, SAMPLE, Timing
from millrace.profiles.eq_1 import rising

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

#: A pass: its rows, its rows that get a token, and its times.
_Pass = tuple[int, int, Timing]


def mixed_model(measured: Measured, layers: int, reference: OperatorModel) -> OperatorModel | None:
    """Fits the model; None if no rows of decodes were measured. KV parallelism is `reference`'s."""
    if not measured.rows:
        return None
    chunks = {
        case: timing
        for case, timing in measured.prefills.items()
        if timing.passes == 1 and case not in measured.held_out
    }
    passes = list(_passes(chunks, measured.rows))
    attn = over_squares(
        {
            case.tokens: timing.operators["attn"] / layers
            for case, timing in chunks.items()
            if not case.history and case.batch == 1
        }
    )
    attn = with_far(attn, measured.far_s, layers)
    decode_attn = _decode_attn(measured.rows, layers)
    linear = {name: _linear(passes, name, layers) for name in LINEAR}
    return OperatorModel(
        layers=layers,
        qkv_proj=linear["qkv_proj"],
        o_proj=linear["o_proj"],
        gate_up_proj=linear["gate_up_proj"],
        down_proj=linear["down_proj"],
        attn=attn,
        attn_call_s=attn.ys[0],
        history_factor=_history_factor(chunks, attn, layers),
        kv_read_s=min(row.slopes[-1] for row in decode_attn.tables),
        decode_attn=decode_attn,
        lm_head=_by(
            (rows, timing.operators["lm_head"] + timing.operators[SAMPLE])
            for _, rows, timing in passes
        ),
        overhead_s=median(timing.operators[AROUND] for timing in chunks.values()),
        kvp_message_s=reference.kvp_message_s,
        kvp_token_s=reference.kvp_token_s,
    )


def _passes(chunks: Mapping[Prefill, Timing], rows: Mapping[Rows, Timing]) -> Iterator[_Pass]:
    for case, timing in chunks.items():
        yield case.tokens * case.batch, case.batch, timing
    for step, timing in rows.items():
        yield step.batch, step.batch, timing


def _linear(passes: Iterable[_Pass], name: str, layers: int) -> Table:
    return _by((tokens, timing.operators[name] / layers) for tokens, _, timing in passes)


def _by(points: Iterable[tuple[int, float]]) -> Table:
    """Builds a table of the median at each x."""
    found: dict[int, list[float]] = {}
    for x, seconds in points:
        found.setdefault(x, []).append(seconds)
    return table_of({x: median(values) for x, values in found.items()}, is_rising=True)


def _history_factor(chunks: Mapping[Prefill, Timing], attn: Table, layers: int) -> Table:
    """Fits the history factor of each chunk length by least squares of relative errors of its
    attention, so that short histories, whose cost is small in it, have little weight. The factor
    falls as chunks grow, because the K/V that is read serves more rows.
    """
    pair_s = 2.0 * attn.slopes[-1]
    over: dict[int, float] = {}
    products: dict[int, float] = {}
    for case, timing in chunks.items():
        if case.history and pair_s:
            taken_s = timing.operators["attn"] / layers
            more = 1.0 - attn.at(case.tokens * case.tokens) / taken_s
            pairs = pair_s * case.tokens * case.history / taken_s
            over[case.tokens] = over.get(case.tokens, 0.0) + pairs * max(more, 0.0)
            products[case.tokens] = products.get(case.tokens, 0.0) + pairs * pairs
    if not over:
        return Table(xs=(1.0,), ys=(1.0,))
    longest_first = sorted(over, reverse=True)
    values = rising([over[tokens] / products[tokens] for tokens in longest_first])
    return table_of(dict(zip(longest_first, values, strict=True)))


def _decode_attn(rows: Mapping[Rows, Timing], layers: int) -> DecodeAttention:
    by_batch: dict[int, dict[int, float]] = {}
    for case, timing in sorted(rows.items()):
        row = by_batch.setdefault(case.batch, {})
        row[case.batch * case.context] = timing.operators["attn"] / layers
    return DecodeAttention(
        batches=tuple(by_batch),
        tables=tuple(table_of(row, is_rising=True) for row in by_batch.values()),
    )
