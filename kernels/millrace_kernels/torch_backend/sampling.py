"""Sampling in torch operators, for every device.

Tokens are ranked by likelihood, so the tokens that `top_k`, `top_p` and `min_p` keep are a prefix:
the first `top_k`; of these the fewest whose mass reaches `top_p` of them; of these the tokens with
at least `min_p` times the likeliest's probability. A prefix among the `CANDIDATES` likeliest is
found without sorting the vocabulary; only rows that need more candidates are sorted whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

CANDIDATES: Final = 1024
_SPARE: Final = 32
_LAST_ID: Final = 0x7FFFFFFF
# Logits per block: on a CPU, a block that fits its caches.
_BLOCK_ELEMENTS: Final = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class _Rows:
    """Settings of the rows of float32 [b, vocab] logits, each [b, 1] on the logits' device.

    top_k is within the vocabulary, and an infinite top_p means off exactly: no rounding of sums can
    drop a token.
    """

    logits: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor

    def pick(self, index: Tensor) -> _Rows:
        return _Rows(
            self.logits[index],
            self.temperatures[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniforms[index],
        )

    def weights(self, logits: Tensor, peaks: Tensor) -> Tensor:
        """Returns probabilities times a factor that makes `peaks`' [b, 1] equal 1: float64 [b, k].

        float64, so that sums in another order (a batch of another size, another device) differ by
        1e-16 and not by 1e-7.
        """
        return logits.double().sub_(peaks.double()).div_(self.temperatures).exp_()


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns ids int64 [b] and peaks float32 [b], as `api.sample` describes it."""
    vocab = logits.shape[1]
    peaks, ids = logits.max(-1)
    filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    drawn = temperatures > 0
    if not drawn.any():
        return ids, peaks
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    share = torch.where(top_p < 1.0, top_p, torch.inf)
    columns = (temperatures, limit, share, min_p, uniforms)
    rows = _Rows(logits, *(column[:, None].to(logits.device) for column in columns))
    block = max(1, _BLOCK_ELEMENTS.get(logits.device.type, 1 << 19) // vocab)
    for index in _blocks(drawn & ~filtered, block):
        at = index.to(logits.device)
        ids[at] = _draw(rows.pick(at), peaks[at, None])
    for index in _blocks(drawn & filtered, block):
        limited = bool((top_k[index] > 0).all())
        most = int(limit[index].max()) + _SPARE if limited else CANDIDATES
        at = index.to(logits.device)
        ids[at] = _draw_filtered(rows.pick(at), min(most, CANDIDATES, vocab))
    return ids, peaks


def _blocks(wanted: Tensor, rows: int) -> list[Tensor]:
    """Returns the indices where bool [b] is set, at most `rows` at a time."""
    index = wanted.nonzero().squeeze(1)
    return [index[start : start + rows] for start in range(0, len(index), rows)]


def _draw(rows: _Rows, peaks: Tensor) -> Tensor:
    """Draws ids int64 [b] by temperature alone; `peaks` [b, 1]."""
    cumulative = rows.weights(rows.logits, peaks).cumsum(-1)
    return _invert(cumulative, rows.uniforms, cumulative[:, -1:]).squeeze(1)


def _invert(cumulative: Tensor, uniforms: Tensor, mass: Tensor) -> Tensor:
    """Returns the index [b, 1] where uniform * mass falls in running sums `cumulative` [b, k];
    `uniforms`, `mass`: [b, 1].

    The index always has weight: uniforms are at most 1 - 2**-53, so the product rounds to less than
    `mass`, and where it equals a running sum the next index with weight is taken. (Only rows with a
    peak that isn't finite may leave the vocabulary.)
    """
    return torch.searchsorted(cumulative, uniforms * mass, right=True).clamp_(
        max=cumulative.shape[1] - 1
    )


def _draw_filtered(rows: _Rows, count: int) -> Tensor:
    """Draws ids int64 [b] among the `count` likeliest tokens, or among all where that isn't
    enough.
    """
    drawn, settled = _draw_among(rows, count)
    if count < rows.logits.shape[1]:
        rest = (~settled).nonzero().squeeze(1)
        if len(rest):
            drawn[rest], _ = _draw_among(rows.pick(rest), rows.logits.shape[1])
    return drawn


def _draw_among(rows: _Rows, count: int) -> tuple[Tensor, Tensor]:
    """Draws among the `count` likeliest tokens: ids [b], and bool [b], False where later tokens may
    belong.
    """
    logits, limit, top_p = rows.logits, rows.top_k, rows.top_p
    vocab = logits.shape[1]
    values, ids = ranked(logits, count)
    within_k = torch.arange(count, device=logits.device) < limit
    weights = rows.weights(values, values[:, :1]) * within_k
    cumulative = weights.cumsum(-1)

    total = cumulative[:, -1:]
    if count < vocab:  # the mass of top_k's tokens, if these are more than the ranked ones
        everything = rows.weights(logits, values[:, :1]).sum(-1, keepdim=True)
        total = torch.where(limit <= count, total, everything)
    kept = within_k & (weights >= rows.min_p) & ((cumulative - weights) < top_p * total)
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1

    index = _invert(cumulative, rows.uniforms, cumulative.gather(1, last))
    # Certain where the ranking is, and where the mass that top_p refers to is known.
    settled = (values.gather(1, last) > values[:, -1:]) & (
        (limit <= count) | (limit == vocab) | torch.isinf(top_p)
    )
    return ids.gather(1, index).squeeze(1), settled.squeeze(1)


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ranks the `count` largest of float32 [b, vocab] logits, largest first, equal logits by lowest
    id.

    Returns their values float32 and ids int64, both [b, count]. Of ids whose logits equal the last
    value of a row, some may be missing where count < vocab: the ranking is certain only above it.
    """
    vocab = logits.shape[-1]
    if count < vocab:
        values, ids = torch.topk(logits, count, dim=-1, sorted=False)
    else:
        values, ids = logits, torch.arange(vocab, device=logits.device).expand_as(logits)
    # Sort keys: the logit's bits made monotonic (+ 0.0 turns -0.0 into 0.0), then the id counted
    # backwards.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _LAST_ID)
    keys = (ordered.long() << 32) | (_LAST_ID - ids)
    ids = _LAST_ID - (keys.sort(dim=-1, descending=True).values & _LAST_ID)
    return logits.gather(-1, ids), ids
