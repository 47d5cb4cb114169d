"""Fits the constants that the measured tables lack to numbers printed in the papers.

Fitted here: a pass's cost beyond its GEMMs and attention (Tetris Table 1, SP 1), attention of
prompts longer than the measured prompts (the same), the cost of a ring step (Table 1, SP 2 to 16),
and the cost of KV parallelism's communication (Medha section 3.3 and Mnemosyne section 6). Fits are
linear least squares on relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.core.cost.latency import Latency
from millrace.core.cost.operators import OperatorModel, Table
from millrace.profiles.eq_1 import Points, fit, latency, rounded

K = 1024  # one "k" of Table 1


def table_1(papers: Mapping[str, Any]) -> Mapping[int, Points]:
    """Returns SP degree -> measured (tokens, seconds) of Llama-3-8B on A100, TP 1 (Tetris Table
    1).
    """
    printed = papers["tetris"]["table1_prefill_latency_s_llama3_8b_a100_tp1_bs1"]
    return {
        sp: tuple(
            (k * K, seconds)
            for k, seconds in zip(printed["length_k"], printed[f"sp{sp}"], strict=True)
            if seconds is not None
        )
        for sp in (1, 2, 4, 8, 16)
    }


def ring(one: Latency, sp: int, layers: int, step_s: float) -> Latency:
    """Returns SP degree `sp` by the ring model: compute divided, `sp` - 1 steps of the ring per
    layer.

    `one` is degree 1; each member pays its whole constant.
    """
    start_s = one.a + layers * (sp - 1) * step_s
    points = tuple((m, rounded(start_s + (s - one.a) / sp)) for m, s in one.points)
    return latency(start_s, one.b / sp, one.d / sp, points)


def ring_step_s(table: Mapping[int, Points], layers: int) -> float:
    """Returns the seconds of a ring step in a layer that bring the ring model closest to Table
    1.
    """
    one = latency(*fit(table[1]), table[1])
    steps, over = [], []
    for sp in (2, 4, 8, 16):
        for tokens, seconds in table[sp]:
            without_s = ring(one, sp, layers, 0.0).chunk_s(tokens)
            steps.append(layers * (sp - 1) / seconds)
            over.append((seconds - without_s) / seconds)
    return rounded(float(np.dot(steps, over) / np.dot(steps, steps)))


def long_slope(attn: Table) -> float:
    """Returns seconds per squared token of a layer's attention, over the longest half of the
    lengths.
    """
    far = attn.xs[-1]
    return (attn.ys[-1] - attn.at(far / 4)) / (far - far / 4)


def long_factor(
    points: Points, attn: Table, linear_s: Callable[[int], float], layers: int
) -> float:
    """Returns the share of `long_slope` that Table 1, SP 1, shows at 32k and 128k tokens, without
    64k.

    `linear_s`: seconds of a pass over its tokens, without attention.
    """
    by_tokens = dict(points)
    low, high = 32 * K, 128 * K
    attn_s = by_tokens[high] - by_tokens[low] - linear_s(high) + linear_s(low)
    return attn_s / layers / (high**2 - low**2) / long_slope(attn)


@dataclass(frozen=True)
class Elementwise:
    """Seconds that a layer spends outside its GEMMs and attention, on A100 for Llama-3-8B, TP 1.

    `launch_s` at one token, growing linearly to `level_s` at `ramp_tokens`, constant from there on.
    `shares` of it by kernel: norm (each of two), rope, act, add (each of two).
    """

    launch_s: float
    level_s: float
    ramp_tokens: int
    shares: Mapping[str, float]


def elementwise(
    vidur: Mapping[str, Mapping[int, float]], gaps_s: Sequence[float], layers: int
) -> Elementwise:
    """Fits Vidur's kernels at one token, and `gaps_s`: Table 1 less GEMMs and attention.

    The gap of Table 1 is a constant from 4k to 16k tokens. Element-wise work is linear in tokens
    and has about the gap's size at 4k, so it is taken to reach the constant there: a short chunk
    must not pay the whole of it. Its further growth is within the GEMMs' error.
    """
    kernels = {
        "norm": ("input_layernorm", "post_attention_layernorm"),
        "rope": ("attn_rope",),
        "act": ("mlp_act",),
        "add": ("add", "add"),
    }
    launch_s = sum(vidur[op][1] for ops in kernels.values() for op in ops)
    at_ramp = {name: sum(vidur[op][4 * K] for op in ops) for name, ops in kernels.items()}
    total = sum(at_ramp.values())
    return Elementwise(
        launch_s=launch_s,
        level_s=sum(gaps_s) / len(gaps_s) / layers,
        ramp_tokens=4 * K,
        shares={
            name: seconds / total / (1 + (name in ("norm", "add")))
            for name, seconds in at_ramp.items()
        },
    )


#: TPOT with KVP over TPOT without, Llama-3-8B, TP 8: (context tokens, degree, ratio).
#: Medha section 3.3 (-40 % at 10M), Mnemosyne section 6 (2.5x less at 10M, 1.7x less at 4M).
KVP_RATIOS = ((10_000_000, 2, 0.6), (10_000_000, 4, 1 / 2.5), (4_000_000, 4, 1 / 1.7))


def kvp_message_s(operators: OperatorModel) -> float:
    """Returns the seconds of one round of KVP communication in a layer, from `KVP_RATIOS`.

    `operators`: of Llama-3-8B on H100, TP 8, without communication.
    """
    rounds, over = [], []
    for context, degree, ratio in KVP_RATIOS:
        alone_s = operators.decode_step_s(1, context)
        shared_s = operators.decode_step_s(1, context, degree)
        target_s = ratio * alone_s
        rounds.append(operators.layers * (1 + (degree - 1).bit_length()) / target_s)
        over.append((target_s - shared_s) / target_s)
    return rounded(float(np.dot(rounds, over) / np.dot(rounds, rounds)))
