"""The two grouped products of a mixture of experts, in Triton.

Assignments (a token with one of its experts) come sorted by expert. A program takes BLOCK_M
assignments of one expert, so a weight tile is read once for all of them.
"""

# ruff: noqa: PLR0913 - a kernel's arguments are all that reaches it.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit


@jit("x_stride")
def expand(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    first_block_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    x_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (blocks of WIDTH, blocks of assignments): inner [a, WIDTH] = silu(x @ gate) * (x @ up).

    weight [EXPERTS, 2 * WIDTH, HIDDEN], gate first; inner's rows are in sorted order.
    """
    expert = tl.load(block_expert_ptr + tl.program_id(1))
    if expert >= EXPERTS:
        return
    own_block = tl.program_id(1) - tl.load(first_block_ptr + expert)
    at = tl.load(bounds_ptr + expert) + own_block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = at < tl.load(bounds_ptr + expert + 1)
    token = tl.load(order_ptr + at, mask=live, other=0) // PER_TOKEN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + token[:, None] * x_stride
    gate_row = weight_ptr + expert * (2 * WIDTH * HIDDEN) + n.to(tl.int64)[:, None] * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        column = (start + k)[None, :]
        inside = column < HIDDEN
        x = tl.load(x_row + column, mask=live[:, None] & inside, other=0.0)
        present = (n < WIDTH)[:, None] & inside
        w_gate = tl.load(gate_row + column, mask=present, other=0.0)
        w_up = tl.load(gate_row + WIDTH * HIDDEN + column, mask=present, other=0.0)
        gate = tl.dot(x, tl.trans(w_gate), gate, input_precision=PRECISION)
        up = tl.dot(x, tl.trans(w_up), up, input_precision=PRECISION)
    inner = (gate * tl.sigmoid(gate) * up).to(inner_ptr.dtype.element_ty)
    inner_at = at.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(inner_ptr + inner_at, inner, mask=live[:, None] & (n < WIDTH)[None, :])


@jit()
def contract(
    inner_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    share_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    first_block_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (blocks of HIDDEN, blocks of assignments): out float32 [a, HIDDEN] = share * (inner @
    weight.T), back in the tokens' order. weight [EXPERTS, HIDDEN, WIDTH], share float32 [a].
    """
    expert = tl.load(block_expert_ptr + tl.program_id(1))
    if expert >= EXPERTS:
        return
    own_block = tl.program_id(1) - tl.load(first_block_ptr + expert)
    at = tl.load(bounds_ptr + expert) + own_block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = at < tl.load(bounds_ptr + expert + 1)
    assignment = tl.load(order_ptr + at, mask=live, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inner_row = inner_ptr + at.to(tl.int64)[:, None] * WIDTH
    weight_row = weight_ptr + expert * (HIDDEN * WIDTH) + n.to(tl.int64)[:, None] * WIDTH
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        column = (start + k)[None, :]
        inside = column < WIDTH
        inner = tl.load(inner_row + column, mask=live[:, None] & inside, other=0.0)
        weight = tl.load(weight_row + column, mask=(n < HIDDEN)[:, None] & inside, other=0.0)
        acc = tl.dot(inner, tl.trans(weight), acc, input_precision=PRECISION)
    share = tl.load(share_ptr + assignment, mask=live, other=0.0)
    out_at = assignment[:, None] * HIDDEN + n[None, :]
    tl.store(out_ptr + out_at, acc * share[:, None], mask=live[:, None] & (n < HIDDEN)[None, :])
