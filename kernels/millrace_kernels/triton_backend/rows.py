"""Norms, SwiGLU's product and rotary embedding with the K/V write, on a CUDA device.

With the merge, the choice of experts and sampling of the sibling modules, this is a
`dispatch.Rows`.

Tile sizes here follow from the row's width alone: these kernels are bound by memory, not by tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.triton_backend.attention import merge_attention_ as merge_attention_
from millrace_kernels.triton_backend.jit import block, launch
from millrace_kernels.triton_backend.kernels import rows as kernels
from millrace_kernels.triton_backend.moe import choose_experts as choose_experts
from millrace_kernels.triton_backend.sampling import sample as sample

_SILU_BLOCK = 1024
_HEADS_BLOCK = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the root-mean-square norm over the last dimension of x [..., width]; weight:
    [width].

    float32 inside, rounded once. Raises ValueError when weight does not fit.
    """
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual); the sum is rounded to x's dtype first.

    The sum is written into `total` where it is given, which may be the residual itself. Raises
    ValueError unless total is contiguous, of x's shape and dtype.
    """
    if x.shape != residual.shape:
        raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}")
    if total is not None and not (
        total.shape == x.shape and total.dtype == x.dtype and total.is_contiguous()
    ):
        raise ValueError(f"total is {total.dtype} {tuple(total.shape)}, x {tuple(x.shape)}")
    return _norm(x, residual, weight, eps, total)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"weight is {tuple(weight.shape)} for rows of {width}")
    rows = _side_by_side(x)
    old = rows if residual is None else _side_by_side(residual)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if total is None:
        total = rows if residual is None else torch.empty_like(out)
    if rows.shape[0]:
        launch(
            kernels.norm_rows,
            (rows.shape[0],),
            rows,
            old,
            weight,
            out,
            total,
            eps,
            rows.stride(0),
            old.stride(0),
            WIDTH=width,
            BLOCK=block(width),
            ADDS=residual is not None,
            num_warps=min(max(block(width) // 512, 1), 16),
        )
    return out.view(x.shape), x if residual is None else total.view_as(x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., i], for gate_up [..., 2 * i] with gate in the first half.

    Raises ValueError for rows of odd length.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[-1]}, which is odd")
    width = gate_up.shape[-1] // 2
    rows = _side_by_side(gate_up)
    out = torch.empty((rows.shape[0], width), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        launch(
            kernels.multiply_by_silu,
            (rows.shape[0], -(-width // _SILU_BLOCK)),
            rows,
            out,
            rows.stride(0),
            WIDTH=width,
            BLOCK=_SILU_BLOCK,
        )
    return out.view(*gate_up.shape[:-1], width)


def _side_by_side(x: Tensor) -> Tensor:
    """Returns x as [rows, width] with contiguous rows; a copy only where strides need it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rope_write_kv(  # noqa: PLR0913 - one argument for each thing that fixes the call
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    *,
    num_q_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norms (if given) and rotates q and k of qkv [n, h + 2k, d], writes k and v to pages; returns
    q.

    q changes IN PLACE and is returned as the view [n, h, d]; qkv, cos, sin (float32 [n, d / 2]) and
    slots (int64 [n]) are contiguous. The device can't refuse a slot outside the pool without making
    the host wait, so it leaves that row unwritten. Raises ValueError when shapes disagree.
    """
    tokens, heads, head_dim = qkv.shape
    _, _, kv_heads, page_tokens, _ = kv_layer.shape
    if heads != num_q_heads + 2 * kv_heads or head_dim != kv_layer.shape[4] or head_dim % 2:
        raise ValueError(
            f"qkv is {tuple(qkv.shape)} for {num_q_heads} q heads and pages {kv_layer.shape[1:]}"
        )
    if cos.shape != (tokens, head_dim // 2) or sin.shape != cos.shape or slots.shape != (tokens,):
        raise ValueError(
            f"cos, sin and slots are {tuple(cos.shape)}, {tuple(sin.shape)}, {tuple(slots.shape)} "
            f"for {tokens} tokens of head_dim {head_dim}"
        )
    if not all(table.is_contiguous() for table in (qkv, cos, sin, slots)):
        raise ValueError("qkv, cos, sin and slots must be contiguous")
    if tokens:
        launch(
            kernels.rotate_and_write,
            (tokens, -(-heads // _HEADS_BLOCK)),
            qkv,
            cos,
            sin,
            kv_layer,
            slots,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            kv_layer.shape[0] * page_tokens,
            *kv_layer.stride()[:4],
            Q_HEADS=num_q_heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            PAGE_TOKENS=page_tokens,
            BLOCK_H=_HEADS_BLOCK,
            BLOCK_HALF=block(head_dim // 2),
            NORMED=q_norm is not None and k_norm is not None,
        )
    return qkv[:, :num_q_heads]
