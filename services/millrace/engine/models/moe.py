"""Mixture-of-experts MLP: a softmax router, then each token through its top-k SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.engine.model_config import MoeConfig
from millrace_kernels import api as kernels


@dataclass(frozen=True, slots=True)
class Routing:
    """What `gate` leaves for `experts`: n tokens, t experts a token."""

    x: Tensor  # [n, hidden], normed
    expert_ids: Tensor  # int64 [n, t]
    weights: Tensor  # float32 [n, t]


def run_router(x: Tensor, router: Tensor, moe: MoeConfig) -> Routing:
    """Chooses the experts of each row of x [n, hidden]; softmax over all experts, in float32."""
    probabilities = kernels.linear(x, router).softmax(-1, dtype=torch.float32)
    weights, expert_ids = probabilities.topk(moe.experts_per_token, dim=-1)
    if moe.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(x, expert_ids, weights)


def run_experts(routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """[n, hidden]: each row's experts' outputs, weighted and summed in float32.

    ``gate_up`` [experts, 2 * width, hidden], ``down`` [experts, hidden, width]. Rows are sorted by
    expert, so that each expert that was chosen runs one matrix product a projection.
    """
    tokens, per_token = routing.expert_ids.shape
    flat_ids = routing.expert_ids.view(-1)
    order = flat_ids.argsort(stable=True)
    counts: list[int] = flat_ids.bincount(minlength=gate_up.shape[0]).tolist()
    rows = routing.x[order // per_token]
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(start, start + count)
            inner = kernels.silu_mul(kernels.linear(rows[own], gate_up[expert]))
            out[own] = kernels.linear(inner, down[expert])
            start += count
    weighted = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    weighted[order] = out * routing.weights.view(-1)[order, None]
    return weighted.view(tokens, per_token, -1).sum(1).to(routing.x.dtype)
