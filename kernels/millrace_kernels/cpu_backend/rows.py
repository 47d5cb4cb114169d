"""The C++ kernels that work row by row. Shape letters: n tokens, h q heads, k kv heads, d head_dim.

A decode step makes dozens of these calls on a few rows, where Python costs more than the work: so
checks are cheap, and each attribute of a tensor is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels import cpu_backend
from millrace_kernels.cpu_backend import TYPES, need
from millrace_kernels.cpu_backend import merge_attention_ as merge_attention_
from millrace_kernels.recording import launch
from millrace_kernels.router import choose_experts as choose_experts

if cpu_backend.AVAILABLE:
    from millrace_kernels import _cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides x [..., width] by its root mean square, rounds to x's dtype, multiplies by weight
    [width].
    """
    return norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(total), total) for total = residual + x, which may be the residual."""
    normed, summed = norm(x, residual, weight, eps)
    return normed, summed if total is None else total.copy_(summed)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(total), total) for total = residual + x, or x itself without a residual."""
    shape, dtype = x.shape, x.dtype
    width = shape[-1]
    need(
        weight.shape == shape[-1:] and weight.dtype == dtype and weight.is_contiguous(),
        "rms_norm needs a contiguous weight of x's width and dtype",
        x,
        weight,
    )
    rows, stride = x, width
    if not x.is_contiguous():
        strides = x.stride()
        if x.dim() == 2 and strides[1] == 1:
            stride = strides[0]
        else:
            rows = x.contiguous()
    total, residual_at, total_at = x, 0, 0
    if residual is not None:
        need(
            residual.shape == shape and residual.dtype == dtype,
            "add_rms_norm needs a residual of x's shape and dtype",
            x,
            residual,
        )
        residual = residual.contiguous()
        total = torch.empty_like(residual)
        residual_at, total_at = residual.data_ptr(), total.data_ptr()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _cpu.rms_norm(
        TYPES[dtype],
        rows.data_ptr(),
        stride,
        residual_at,
        total_at,
        weight.data_ptr(),
        out.data_ptr(),
        out.numel() // max(width, 1),
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., i], for gate_up [..., 2 * i] with gate first."""
    *outer, wide = gate_up.shape
    need(wide % 2 == 0, "silu_mul needs an even width", gate_up)
    gate_up = gate_up.contiguous()
    width = wide // 2
    out = gate_up.new_empty(*outer, width)
    _cpu.silu_mul(
        TYPES[gate_up.dtype],
        gate_up.data_ptr(),
        out.data_ptr(),
        out.numel() // max(width, 1),
        width,
        torch.get_num_threads(),
    )
    return out


def rope_write_kv(  # noqa: PLR0913 - one argument for each thing that fixes the call
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    *,
    num_q_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Norms and rotates q of qkv [n, h + 2k, d] in place; writes normed, rotated k and v to pages.

    Raises IndexError, before anything is written, for a slot outside the pool.
    """
    tokens, heads, head_dim = qkv.shape
    pages, _, kv_heads, page_tokens, _ = kv_layer.shape
    dtype = qkv.dtype
    need(
        heads == num_q_heads + 2 * kv_heads
        and head_dim % 2 == 0
        and kv_layer.shape[4] == head_dim
        and kv_layer.dtype == dtype
        and qkv.is_contiguous()
        and kv_layer.is_contiguous(),
        f"rope_write_kv needs contiguous qkv [n, {num_q_heads} + 2 * kv_heads, head_dim] and pages "
        "that fit it",
        qkv,
        kv_layer,
    )
    angles = (tokens, head_dim // 2)
    need(
        cos.shape == sin.shape == angles
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous(),
        f"rope_write_kv needs contiguous float32 angles {angles}",
        cos,
        sin,
    )
    need(
        slots.shape == (tokens,) and slots.dtype == torch.int64 and slots.is_contiguous(),
        f"rope_write_kv needs int64 slots [{tokens}]",
        slots,
    )
    launch(
        _cpu.rope_write_kv,
        TYPES[dtype],
        qkv.data_ptr(),
        tokens,
        num_q_heads,
        kv_heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        _head_weight(q_norm, qkv),
        _head_weight(k_norm, qkv),
        eps,
        kv_layer.data_ptr(),
        pages,
        page_tokens,
        slots.data_ptr(),
        torch.get_num_threads(),
    )
    return qkv[:, :num_q_heads]


def _head_weight(weight: Tensor | None, qkv: Tensor) -> int:
    """The address of a norm's weight [d]; 0 for none."""
    if weight is None:
        return 0
    need(
        weight.shape == qkv.shape[2:] and weight.dtype == qkv.dtype and weight.is_contiguous(),
        "rope_write_kv needs contiguous norm weights [head_dim] of qkv's dtype",
        weight,
        qkv,
    )
    return weight.data_ptr()


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns ids int64 [b] and peaks float32 [b]; api.sample has checked and described the
    arguments.
    """
    rows, vocab = logits.shape
    if logits.stride()[1] != 1:
        logits = logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64)
    peaks = torch.empty(rows, dtype=torch.float32)
    settings = [x.contiguous() for x in (temperatures, top_k, top_p, min_p, uniforms)]
    t_at, k_at, p_at, m_at, u_at = (x.data_ptr() for x in settings)
    _cpu.sample(
        logits.data_ptr(),
        logits.stride()[0],
        rows,
        vocab,
        t_at,
        k_at,
        p_at,
        m_at,
        u_at,
        ids.data_ptr(),
        peaks.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, peaks
