"""The choice of experts in torch operators, for every backend without a kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_experts(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Returns ids int64 and weights float32 [n, per_token] of the likeliest experts of logits
    [n, E], the likeliest first."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights
