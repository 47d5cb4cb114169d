"""Draws a token after `top_k`, `top_p` and `min_p` have dropped unlikely ones, in that order.

The likeliest tokens come first, so what the filters keep is a prefix: the first `top_k`; of those
the fewest whose mass reaches `top_p` of them; of those the ones with at least `min_p` times the
likeliest's probability. A prefix among the `CANDIDATES` likeliest is found without sorting the
vocabulary; only rows where that does not settle it are sorted whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from millrace.engine.logprobs import ranked
from millrace.engine.sampling_spec import SamplingSpec

CANDIDATES: Final = 1024
_SPARE: Final = 32


def softmax_weights(logits: Tensor, peaks: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Probabilities at each spec's temperature, times a factor that makes the likeliest 1: float64
    [b, k].

    `logits` float32 [b, k]; `peaks` [b, 1], the rows' maxima. float64, so that sums taken in
    another order (a batch of another size, another device) differ by 1e-16 and not by 1e-7.
    """
    temperatures = _column(logits, [spec.temperature for spec in specs])
    return logits.double().sub_(peaks.double()).div_(temperatures).exp_()


def invert(cumulative: Tensor, uniforms: Tensor, mass: Tensor) -> Tensor:
    """The index [b, 1] where uniform * mass falls in running sums `cumulative` [b, k]; `uniforms`,
    `mass`: [b, 1].

    The index always has weight: uniforms are at most 1 - 2**-53, so the product rounds to less
    than `mass`, and where it equals a running sum the next index with weight is taken.
    """
    return torch.searchsorted(cumulative, uniforms * mass, right=True)


def draw_filtered(logits: Tensor, uniforms: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Ids int64 [b] drawn from float32 [b, vocab] logits; `uniforms` float64 [b, 1]."""
    vocab = logits.shape[1]
    count = CANDIDATES
    if all(spec.top_k > 0 for spec in specs):
        count = min(count, max(spec.top_k for spec in specs) + _SPARE)
    drawn, settled = _draw_among(logits, uniforms, specs, min(count, vocab))
    unsettled = [k for k, done in enumerate(settled.tolist()) if not done]
    if unsettled:
        picks = torch.tensor(unsettled, device=logits.device)
        rest = [specs[k] for k in unsettled]
        drawn[picks], _ = _draw_among(logits[picks], uniforms[picks], rest, vocab)
    return drawn


def _draw_among(
    logits: Tensor, uniforms: Tensor, specs: Sequence[SamplingSpec], count: int
) -> tuple[Tensor, Tensor]:
    """Draws looking at the `count` likeliest tokens: ids [b], and bool [b], false where others may
    belong.
    """
    vocab = logits.shape[1]
    values, ids = ranked(logits, count)
    weights = softmax_weights(values, values[:, :1], specs)
    top_k = [min(spec.top_k, vocab) if spec.top_k > 0 else vocab for spec in specs]
    limit = torch.tensor(top_k, device=logits.device).unsqueeze(1)
    within_k = torch.arange(count, device=logits.device) < limit
    weights = weights * within_k
    cumulative = weights.cumsum(dim=-1)

    total = cumulative[:, -1:]
    if any(spec.top_p < 1.0 and k > count for spec, k in zip(specs, top_k, strict=True)):
        everything = softmax_weights(logits, values[:, :1], specs).sum(dim=-1, keepdim=True)
        total = torch.where(limit <= count, total, everything)
    # An infinite top_p is off for certain: no rounding of sums can drop a token.
    top_p = _column(logits, [spec.top_p if spec.top_p < 1.0 else math.inf for spec in specs])
    kept = within_k & (weights >= _column(logits, [spec.min_p for spec in specs]))
    kept &= (cumulative - weights) < top_p * total
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1

    index = invert(cumulative, uniforms, cumulative.gather(1, last))
    settled = kept[:, :1]
    if count < vocab:  # certain where the ranking is, and where the mass top_p refers to is known
        settled = (values.gather(1, last) > values[:, -1:]) & (
            (limit <= count) | (limit == vocab) | torch.isinf(top_p)
        )
    return ids.gather(1, index.clamp_(max=count - 1)).squeeze(1), settled.squeeze(1)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    """float64 [b, 1] on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
