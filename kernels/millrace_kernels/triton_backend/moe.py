"""A mixture of SwiGLU experts on a CUDA device: the choice, a sort by expert, two grouped products.

Shape letters: n tokens, E experts of which a token has t, a = n * t assignments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from millrace_kernels.triton_backend import configs
from millrace_kernels.triton_backend.configs import Config
from millrace_kernels.triton_backend.jit import block, dot_precision, launch
from millrace_kernels.triton_backend.kernels import moe as kernels

_FEW_PER_EXPERT: Final = 16
"""Mean assignments per expert up to which the small tiles run."""

FEW_ASSIGNMENTS: Final = 512
"""Assignments that one program sorts, in place of a dozen launches."""

_CHUNK: Final = 64
_SUM_BLOCK: Final = 1024


def choose_experts(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Returns ids int64 and weights float32 [n, t] of the likeliest experts of logits [n, E]."""
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty((tokens, per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, per_token), dtype=torch.float32, device=logits.device)
    if tokens:
        launch(
            kernels.choose_experts,
            (tokens,),
            *(logits, ids, weights, logits.stride(0)),
            EXPERTS=experts,
            PER_TOKEN=per_token,
            NORMALISED=normalised,
            BLOCK_E=block(experts),
            BLOCK_T=block(per_token),
            num_warps=1,
        )
    return ids, weights


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """The experts' weights: gate_up [E, 2X, H] with gate first, down [E, H, X], both contiguous."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Returns [n, H]: each row of x [n, H] through its experts, weighted and summed in float32.

        expert_ids int64 [n, t] within 0..E - 1, weights float32 [n, t]. The host reads nothing
        back: the launch has as many blocks as the worst split over experts needs, and unused blocks
        return.
        """
        experts, hidden, width = self.down.shape
        tokens, per_token = expert_ids.shape
        assignments = tokens * per_token
        if not assignments:
            return torch.zeros_like(x)
        config = self._config(x, assignments)
        order, bounds, first_block, block_expert = _blocks(
            expert_ids.reshape(-1), experts, config["block_m"]
        )
        inner = torch.empty((assignments, width), dtype=x.dtype, device=x.device)
        tiles: dict[str, Any] = {
            "EXPERTS": experts,
            "HIDDEN": hidden,
            "WIDTH": width,
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "BLOCK_K": config["block_k"],
            "PRECISION": dot_precision(x.dtype),
            "num_warps": config["num_warps"],
            "num_stages": config["num_stages"],
        }
        tables = (order, bounds, first_block, block_expert)
        count, block_n = block_expert.shape[0], config["block_n"]
        x = x if x.stride(1) == 1 else x.contiguous()
        launch(
            kernels.expand,
            (-(-width // block_n), count),
            *(x, self.gate_up, inner, *tables, x.stride(0)),
            PER_TOKEN=per_token,
            **tiles,
        )
        shares = torch.empty((assignments, hidden), dtype=torch.float32, device=x.device)
        launch(
            kernels.contract,
            (-(-hidden // block_n), count),
            *(inner, self.down, shares, weights.reshape(-1), *tables),
            **tiles,
        )
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
        launch(
            kernels.sum_experts,
            (tokens, -(-hidden // _SUM_BLOCK)),
            *(shares, out),
            PER_TOKEN=per_token,
            HIDDEN=hidden,
            BLOCK=_SUM_BLOCK,
        )
        return out

    def _config(self, x: Tensor, assignments: int) -> Config:
        few = assignments <= _FEW_PER_EXPERT * self.down.shape[0]
        return configs.lookup("experts_few" if few else "experts_rows", x.device, x.dtype)


def _blocks(
    expert_ids: Tensor, experts: int, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts assignments by expert and cuts them into blocks, all int64 on the device.

    Returns the sorted order [a], the start of each expert's assignments in it [E + 1], each
    expert's first block [E], and each block's expert (E: no block).
    """
    assignments, device = expert_ids.numel(), expert_ids.device
    most = min(assignments, assignments // block_m + min(experts, assignments))
    if assignments <= FEW_ASSIGNMENTS:
        return _blocks_of_few(expert_ids, experts, block_m, most)
    ids, order = expert_ids.sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(experts + 1, device=device))
    counts = (bounds.diff() + block_m - 1) // block_m
    last_block = counts.cumsum(0)
    block_expert = torch.searchsorted(last_block, torch.arange(most, device=device), right=True)
    return order, bounds, last_block - counts, block_expert


def _blocks_of_few(
    expert_ids: Tensor, experts: int, block_m: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (expert_ids.numel(), experts + 1, experts, most)
    tables = torch.empty(sum(sizes), dtype=torch.int64, device=expert_ids.device)
    order, bounds, first_block, block_expert = tables.split_with_sizes(sizes)
    launch(
        kernels.group_by_expert,
        (1,),
        *(expert_ids, order, bounds, first_block, block_expert, sizes[0], most),
        EXPERTS=experts,
        BLOCK_M=block_m,
        BLOCK_E=block(experts),
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return order, bounds, first_block, block_expert
