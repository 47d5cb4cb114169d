"""Measured prefills and decode steps whose law is known."""

from __future__ import annotations

from millrace.profiler.fitting import Subject
from millrace.profiler.measure import Case, Decode, Far, Measured, Mixed, Prefill, Rows
from millrace.profiler.workload import Timing

LAYERS = 4
CHUNK = 512
SUBJECT = Subject(
    model="m",
    device="d",
    dtype="float32",
    threads=1,
    layers=LAYERS,
    kv_bytes_per_token=64,
    max_chunk_tokens=CHUNK,
)
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def prefill(case: Prefill, slower: float = 1.0) -> Timing:
    """Times a prefill in passes of at most CHUNK: 1 ms each, 20 us per token, 10 ns per pair, 50 us
    per prompt's end.
    """
    count = -(-case.tokens // CHUNK) if case.batch == 1 else 1
    linear_s = 20e-6 * case.tokens * case.batch * slower
    pairs = case.tokens * (case.history + case.tokens / 2)
    operators = {
        "embed": 1e-3 * count * slower,
        "qkv_proj": 0.3 * linear_s,
        "attn": 10e-9 * pairs * case.batch * slower,
        "o_proj": 0.1 * linear_s,
        "gate_up_proj": 0.4 * linear_s,
        "down_proj": 0.2 * linear_s,
        "lm_head": 30e-6 * case.batch * slower,
        "sample": 20e-6 * case.batch * slower,
    }
    return Timing(seconds=sum(operators.values()), operators=operators, passes=count)


def far_s(case: Far) -> float:
    """Times the attention alone."""
    return 10e-9 * case.pairs


def step_s(case: Decode) -> float:
    return 200e-6 + 50e-6 * case.batch + 5e-9 * case.batch * case.context


def rows(case: Rows) -> Timing:
    """Times rows as a pass of as many tokens, but each reads its context: 5 ns per token."""
    linear_s = 20e-6 * case.batch
    operators = {
        "embed": 1e-3,
        "qkv_proj": 0.3 * linear_s,
        "attn": 5e-9 * case.batch * case.context,
        "o_proj": 0.1 * linear_s,
        "gate_up_proj": 0.4 * linear_s,
        "down_proj": 0.2 * linear_s,
        "lm_head": 30e-6 * case.batch,
        "sample": 20e-6 * case.batch,
    }
    return Timing(seconds=sum(operators.values()), operators=operators, passes=1)


def mixed_s(case: Mixed) -> float:
    """Times both together, which share the pass."""
    chunk = prefill(Prefill(case.tokens, case.history))
    return chunk.seconds + rows(Rows(case.decodes, case.context)).seconds - 1e-3


def measured(held_out: tuple[Case, ...] = ()) -> Measured:
    cases = [Prefill(tokens) for tokens in LENGTHS]
    cases += [Prefill(t, h) for t in (32, 128, 256, 512) for h in (256, 512) if t + h <= 1024]
    cases += [Prefill(48, 0, 2), Prefill(48, 0, 8)]
    steps = [Decode(b, context) for b in (1, 2, 4, 8, 16, 32, 64) for context in (128, 1024)]
    cases += [case for case in held_out if isinstance(case, Prefill)]
    steps += [case for case in held_out if isinstance(case, Decode)]
    return Measured(
        prefills={case: prefill(case) for case in cases},
        decode_s={case: step_s(case) for case in steps},
        held_out=frozenset(held_out),
        longest=1024,
        rounds=1,
        spent_s=1.0,
        rows={case: rows(case) for case in (Rows(b, c) for b in (1, 8, 64) for c in (128, 1024))},
        mixed_s={case: mixed_s(case) for case in held_out if isinstance(case, Mixed)},
    )
