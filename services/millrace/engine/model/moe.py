"""Mixture-of-experts MLP: a softmax router, then each token through its top-k SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millrace.engine.model.config import MoeConfig
from millrace_kernels.api import choose_experts
from millrace_kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Routing:
    """The result of `gate` for `experts`: n tokens, t experts per token."""

    x: Tensor  # [n, hidden], normed
    expert_ids: Tensor  # int64 [n, t]
    weights: Tensor  # float32 [n, t]


def run_router(x: Tensor, router: Linear, moe: MoeConfig) -> Routing:
    """Chooses the experts of each row of x [n, hidden]; softmax over all experts, in float32."""
    expert_ids, weights = choose_experts(router(x), moe.experts_per_token, normalised=moe.normalise)
    return Routing(x, expert_ids, weights)
