"""Fits a profile to measured passes: Tetris Eq. (1) with its points, and the operator tables.

The tables come from passes that were timed at operator boundaries:

- An operator's time is its mean over the layers. In the last layer, the engine computes only the
  last position, so a pass of few layers costs less than its layers; the mean predicts passes right.
- A decode step is not timed by operators: it runs from a recording, faster than a pass of as many
  tokens. The linear operators of few tokens are at most the time of a step on the least context,
  divided as in a prefill. Decode attention is the rest of a step's time.
- Attention beyond the longest prompt was measured alone (`Far`): it gives Eq. (1) its c, half of it
  its d, and the attention tables their last slope. Short prompts are not extrapolated.
- Prefill attention is a prefill's time without the linear operators and lm_head; it includes costs
  once per prompt (planning, rotary tables, the embedding, sampling). overhead_s is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.core.cost.profile import Profile
from millrace.engine.assembly import Engine
from millrace.profiler.accuracy import compare, errors
from millrace.profiler.groups.measure import MeasuredGroups
from millrace.profiler.measure import Decode, Far, Measured, Prefill, measure
from millrace.profiler.mixed_fit import LINEAR, mixed_model
from millrace.profiler.tables import over_squares, table_of, with_far
from millrace.profiler.workload import Timing, Workload
from millrace.profiles import eq_1, load_profile
from millrace.profiles.degrees import REFERENCE, estimated
from millrace.profiles.eq_1 import rising, rounded

NOTHING: Mapping[Far, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model and machine that were measured."""

    model: str
    device: str
    dtype: str
    threads: int
    layers: int
    kv_bytes_per_token: int
    max_chunk_tokens: int
    tp: int = 1
    is_accelerated: bool = False  # each instance has its own devices


def measured_alone(
    engine: Engine, budget_s: float, *, threads: int, max_chunk_tokens: int
) -> tuple[Subject, Measured]:
    """Measures an engine in this process for about `budget_s` seconds, one prompt per pass.

    A pass has at most `max_chunk_tokens`.
    """
    workload = Workload(engine, max_chunk_tokens=max_chunk_tokens, max_batch=1)
    with closing(workload):
        measured = measure(workload, budget_s)
    subject = Subject(
        model=engine.folder.name,
        device=engine.device.type,
        dtype=engine.layout.dtype,
        threads=threads,
        layers=engine.layout.num_layers,
        kv_bytes_per_token=engine.layout.bytes_per_token,
        max_chunk_tokens=max_chunk_tokens,
    )
    return subject, measured


def build_profile(
    subject: Subject, measured: Measured, groups: MeasuredGroups | None = None
) -> Profile:
    """Builds the profile, with its errors on held-out cases.

    Times of one instance in `groups` replace those that were measured without a service.
    """
    reference = load_profile(REFERENCE)
    by_sp = {1: prefill_latency(measured)}
    by_sp |= estimated(by_sp[1], subject.layers) | group_latencies(groups, measured.far_s)
    degrees = () if groups is None else tuple(sorted(groups.seconds.keys() - {1}))
    found = Profile(
        name=f"{subject.model}-{subject.dtype}-{subject.threads}-threads",
        model=subject.model,
        device=subject.device,
        tp=subject.tp,
        layers=subject.layers,
        kv_bytes_per_token=subject.kv_bytes_per_token,
        prefill=SpLatency(by_sp=MappingProxyType(by_sp)),
        operators=operator_model(measured, subject.layers, reference.operators),
        kv_transfer_bytes_s=reference.kv_transfer_bytes_s,
        ring_step_s=reference.ring_step_s,
        mixed=mixed_model(measured, subject.layers, reference.operators),
        measured_sp=degrees,
        sources=(
            f"measured by `millrace profile` in {measured.spent_s:.1f} s, "
            f"{measured.rounds} times or fewer",
            *_groups_source(groups),
        ),
        assumptions=(
            _beyond(measured),
            f"SP degrees that were not measured by the ring model, ring_step_s and KV parallelism "
            f"of {REFERENCE}",
            *_sharing(subject, groups),
            f"kv_transfer_bytes_s of {REFERENCE}; `millrace bench transfer` measures this machine",
            f"a longer prompt goes in equal passes of {subject.max_chunk_tokens} tokens at most",
        ),
    )
    compared = compare(found, measured, subject.max_chunk_tokens, groups)
    return replace(found, errors=MappingProxyType(errors(compared)))


def prefill_latency(measured: Measured) -> Latency:
    """Fits Eq. (1) of one instance."""
    return _latency(
        {
            case: timing.seconds
            for case, timing in measured.prompts.items()
            if case.batch == 1 and case not in measured.held_out
        },
        measured.far_s,
    )


def group_latencies(
    groups: MeasuredGroups | None, far_s: Mapping[Far, float] = NOTHING
) -> dict[int, Latency]:
    """Fits Eq. (1) of every measured SP degree.

    Beyond the longest prompt, each member attends for its share of a chunk: Tetris section 5.1.
    """
    if groups is None:
        return {}
    return {
        sp: _latency(
            {case: s for case, s in found.items() if case not in groups.held_out},
            {case: s / sp for case, s in far_s.items()},
        )
        for sp, found in groups.seconds.items()
    }


def _latency(seconds_of: Mapping[Prefill, float], far_s: Mapping[Far, float]) -> Latency:
    """Fits Eq. (1) with a point for every prompt length; c comes from chunks on history."""
    alone: list[tuple[Prefill, float]] = []
    behind: list[tuple[Prefill, float]] = []
    for case, taken_s in sorted(seconds_of.items()):
        (behind if case.history else alone).append((case, taken_s))
    seconds = rising([seconds for _, seconds in alone])
    points = tuple((case.tokens, rounded(s)) for (case, _), s in zip(alone, seconds, strict=True))
    a, b, d = eq_1.fit(points)
    bare = replace(eq_1.latency(a, b, d, points), c=0.0)
    more = [(one.tokens, one.history, s - bare.chunk_s(one.tokens)) for one, s in behind]
    more += [
        (far.tokens, far.history, s * far.tokens * far.history / far.pairs)
        for far, s in sorted(far_s.items())
    ]
    c = eq_1.history_term(bare, more)
    if far_s:
        a, b, d = eq_1.fit(points, d=c / 2)
    return replace(eq_1.latency(a, b, d, points), c=rounded(c))


def _beyond(measured: Measured) -> str:
    """Describes the source of the times of prompts beyond the longest."""
    if not measured.far_s:
        return f"prompts of more than {measured.longest} tokens by Eq. (1)"
    end = max(far.end for far in measured.far_s)
    return (
        f"prompts of more than {measured.longest} tokens by Eq. (1), with attention measured by "
        f"itself up to {end} tokens"
    )


def operator_model(measured: Measured, layers: int, reference: OperatorModel) -> OperatorModel:
    """Fits the operator tables; KV parallelism is `reference`'s."""
    fitted = {c: t for c, t in sorted(measured.prompts.items()) if c not in measured.held_out}
    singles = {
        c.tokens: t for c, t in fitted.items() if c.batch == 1 and not c.history and t.passes == 1
    }
    steps = {c: s for c, s in sorted(measured.decode_s.items()) if c not in measured.held_out}
    lm_head = _lm_head(fitted, singles)
    linear = _linear(singles, steps, lm_head, layers)
    attn = with_far(_attn(singles, linear, lm_head, layers), measured.far_s, layers)
    decode_attn = _decode_attn(steps, linear, lm_head, layers)
    return OperatorModel(
        layers=layers,
        qkv_proj=linear["qkv_proj"],
        o_proj=linear["o_proj"],
        gate_up_proj=linear["gate_up_proj"],
        down_proj=linear["down_proj"],
        attn=attn,
        attn_call_s=attn.ys[0],
        history_factor=_history_factor(fitted, singles, attn, layers),
        kv_read_s=min(table.slopes[-1] for table in decode_attn.tables),
        decode_attn=decode_attn,
        lm_head=lm_head,
        overhead_s=0.0,
        kvp_message_s=reference.kvp_message_s,
        kvp_token_s=reference.kvp_token_s,
    )


def _groups_source(groups: MeasuredGroups | None) -> list[str]:
    if groups is None:
        return []
    return [
        f"groups of {_listed(sorted(groups.seconds))} measured live in {groups.spent_s:.1f} s, "
        f"{groups.rounds} times"
    ]


def _sharing(subject: Subject, groups: MeasuredGroups | None) -> list[str]:
    """Says which groups' instances shared cores, so that their times hold for one machine only."""
    if groups is None or subject.is_accelerated:
        return []
    crowded = [sp for sp in sorted(groups.seconds) if sp * subject.threads > groups.cores]
    if not crowded:
        return []
    return [
        f"groups of {_listed(crowded)}: their instances of {subject.threads} threads shared "
        f"{groups.cores} cores, so the times hold for instances on this one machine"
    ]


def _listed(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees))


def _lm_head(fitted: Mapping[Prefill, Timing], singles: Mapping[int, Timing]) -> Table:
    """Fits the seconds of lm_head over the requests of a pass."""
    points = {1: median(timing.operators["lm_head"] for timing in singles.values())}
    for case, timing in fitted.items():
        if case.batch > 1:
            points[case.batch] = timing.operators["lm_head"]
    return table_of(points, is_rising=True)


def _linear(
    singles: Mapping[int, Timing], steps: Mapping[Decode, float], lm_head: Table, layers: int
) -> Mapping[str, Table]:
    """Fits the seconds of a layer over the tokens of a pass, by operator."""
    as_prefill = {
        name: table_of({tokens: t.operators[name] / layers for tokens, t in singles.items()})
        for name in LINEAR
    }
    least_s: dict[int, float] = {}  # batch -> step on the least context
    for case, step_s in steps.items():
        least_s.setdefault(case.batch, step_s)
    shares = {tokens: 1.0 for tokens in singles if tokens > max(least_s)}
    for batch, step_s in least_s.items():
        whole_s = layers * _sum_at(as_prefill, batch)
        shares[batch] = min(max(step_s - lm_head.at(batch), 0.0) / whole_s, 1.0)
    share = table_of(shares)
    grid = singles.keys() | least_s.keys()
    return {
        name: table_of({x: table.at(x) * min(share.at(x), 1.0) for x in grid})
        for name, table in as_prefill.items()
    }


def _attn(
    singles: Mapping[int, Timing], linear: Mapping[str, Table], lm_head: Table, layers: int
) -> Table:
    """Fits attention over squared tokens; the last slope is above 0 if any slope is."""
    return over_squares(
        {
            count: max(timing.seconds - lm_head.at(1), 0.0) / layers - _sum_at(linear, count)
            for count, timing in singles.items()
        }
    )


def _history_factor(
    fitted: Mapping[Prefill, Timing], singles: Mapping[int, Timing], attn: Table, layers: int
) -> Table:
    by_tokens: dict[int, list[float]] = {}
    pair_s = 2.0 * attn.slopes[-1]
    for case, timing in fitted.items():
        if case.history and pair_s > 0.0 and (alone := singles.get(case.tokens)):
            more_s = (timing.operators["attn"] - alone.operators["attn"]) / layers
            factor = max(more_s, 0.0) / (pair_s * case.tokens * case.history)
            by_tokens.setdefault(case.tokens, []).append(factor)
    return table_of({t: median(factors) for t, factors in by_tokens.items()} or {1: 1.0})


def _decode_attn(
    steps: Mapping[Decode, float], linear: Mapping[str, Table], lm_head: Table, layers: int
) -> DecodeAttention:
    rows: dict[int, dict[int, float]] = {}
    for case, step_s in steps.items():
        rest_s = lm_head.at(case.batch) + layers * _sum_at(linear, case.batch)
        row = rows.setdefault(case.batch, {})
        row[case.batch * case.context] = max(step_s - rest_s, 0.0) / layers
    return DecodeAttention(
        batches=tuple(rows), tables=tuple(table_of(row, is_rising=True) for row in rows.values())
    )


def _sum_at(tables: Mapping[str, Table], tokens: float) -> float:
    return sum(table.at(tokens) for table in tables.values())
