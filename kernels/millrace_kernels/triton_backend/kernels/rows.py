"""Norms, SwiGLU's product and rotary embedding with the K/V write, in Triton: float32 inside."""

# ruff: noqa: PLR0913 - a kernel's arguments are all that reaches it.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit


@jit()
def norm_rows(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Grid (n,): writes a row's norm into out; with ADDS the norm of x + residual, whose rounded
    sum goes into total. out and total [n, WIDTH] contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    x = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        old = tl.load(residual_ptr + row * residual_stride + i, mask=inside, other=0.0)
        rounded = (x + old.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + i, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + i, out, mask=inside)


@jit()
def multiply_by_silu(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (n, blocks of WIDTH): writes silu(gate) * up of rows [2 * WIDTH] into out [n, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate_ptr = gate_up_ptr + row * row_stride + i
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + i, out, mask=inside)


@jit("slots_there")
def rotate_and_write(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    eps: tl.tensor,
    slots_there: tl.tensor,
    page_stride: tl.tensor,
    v_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    """Grid (n, blocks of the h + 2k heads): rotates q of qkv [n, h + 2k, d] in place, writes k and
    v into pages.

    A slot outside the pool's `slots_there` is not written.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    present = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    at = (row * (Q_HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    low_ptr = qkv_ptr + at[:, None] + i[None, :]
    low = tl.load(low_ptr, mask=present, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=present, other=0.0).to(tl.float32)

    new_low = low
    new_high = high
    if NORMED:
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(square + eps))[:, None]
        q_low = tl.load(q_norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
        new_low = low * scale * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        new_high = high * scale * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    cos = tl.load(cos_ptr + row * HALF + i, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + i, mask=inside, other=0.0)[None, :]
    low = tl.where(is_v[:, None], low, new_low * cos - new_high * sin)
    high = tl.where(is_v[:, None], high, new_high * cos + new_low * sin)
    low = low.to(qkv_ptr.dtype.element_ty)
    high = high.to(qkv_ptr.dtype.element_ty)
    tl.store(low_ptr, low, mask=present & is_q[:, None])
    tl.store(low_ptr + HALF, high, mask=present & is_q[:, None])

    slot = tl.load(slots_ptr + row)
    if (slot >= 0) & (slot < slots_there):
        kv_head = (head - Q_HEADS - tl.where(is_v, KV_HEADS, 0)).to(tl.int64)
        page_at = slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * slot_stride
        write_at = page_at + tl.where(is_v, v_stride, 0) + kv_head * kv_head_stride
        write_ptr = kv_ptr + write_at[:, None] + i[None, :]
        written = present & (head >= Q_HEADS)[:, None]
        tl.store(write_ptr, low, mask=written)
        tl.store(write_ptr + HALF, high, mask=written)
