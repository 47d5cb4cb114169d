"""A mixture of experts in Triton: the choice of experts, and the two grouped products.

An assignment is a token with one of its experts. Assignments come to the products sorted by expert.
A program takes BLOCK_M assignments of one expert, so a weight tile is read once for all of them.
"""

# ruff: noqa: PLR0913 - a kernel's arguments are all that reaches it.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit


@jit()
def choose_experts(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Grid (n,): ids int64 and weights float32 [n, PER_TOKEN] of a row's likeliest experts, the
    likeliest first, of equal ones the lowest id first.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    t = tl.arange(0, BLOCK_T)
    there = e < EXPERTS
    logits = tl.load(logits_ptr + row * logits_stride + e, mask=there, other=float("-inf"))
    logits = logits.to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    left = tl.where(there, shares / tl.sum(shares, 0), -1.0)
    ids = tl.zeros([BLOCK_T], tl.int32)
    weights = tl.zeros([BLOCK_T], tl.float32)
    for i in range(PER_TOKEN):
        best = tl.max(left, 0)
        # Of numbers that are not finite none is the best: the id stays within the experts.
        expert = tl.minimum(tl.min(tl.where(left == best, e, BLOCK_E), 0), EXPERTS - 1)
        ids = tl.where(t == i, expert, ids)
        weights = tl.where(t == i, best, weights)
        left = tl.where(e == expert, -1.0, left)
    if NORMALISED:
        weights = weights / tl.sum(weights, 0)
    at = row * PER_TOKEN + t
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=t < PER_TOKEN)
    tl.store(weights_ptr + at, weights, mask=t < PER_TOKEN)


@jit("assignments", "blocks")
def group_by_expert(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    first_block_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    assignments: tl.tensor,
    blocks: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid (1,): the tables of few assignments, CHUNK at a time; all int64. ids [assignments].

    order [assignments]: assignments by expert, in their order. bounds [EXPERTS + 1]: the start of
    each expert's. first_block [EXPERTS] and block_expert [blocks], EXPERTS for none: of blocks of
    BLOCK_M.
    """
    e = tl.arange(0, BLOCK_E)
    a = tl.arange(0, CHUNK)
    there = e < EXPERTS
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, assignments, CHUNK):
        ids = tl.load(ids_ptr + start + a, mask=start + a < assignments, other=-1)
        counts += tl.sum((ids[None, :] == e[:, None]).to(tl.int32), 1)
    seen = tl.cumsum(counts, 0) - counts
    own_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    last_block = tl.cumsum(own_blocks, 0)
    tl.store(bounds_ptr + e, seen.to(tl.int64), mask=there)
    tl.store(bounds_ptr + EXPERTS, assignments.to(tl.int64))
    tl.store(first_block_ptr + e, (last_block - own_blocks).to(tl.int64), mask=there)
    for start in range(0, blocks, CHUNK):
        passed = (last_block[:, None] <= (start + a)[None, :]) & there[:, None]
        expert = tl.sum(passed.to(tl.int32), 0)
        tl.store(block_expert_ptr + start + a, expert.to(tl.int64), mask=start + a < blocks)
    for start in range(0, assignments, CHUNK):
        live = start + a < assignments
        ids = tl.load(ids_ptr + start + a, mask=live, other=-1)
        own = (ids[None, :] == e[:, None]).to(tl.int32)
        place = tl.sum(own * (seen[:, None] + tl.cumsum(own, 1) - 1), 0)
        tl.store(order_ptr + place, (start + a).to(tl.int64), mask=live)
        seen += tl.sum(own, 1)


@jit()
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


@jit()
def sum_experts(
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (n, blocks of HIDDEN): out [n, HIDDEN] = the sum of a token's float32 [PER_TOKEN,
    HIDDEN]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(PER_TOKEN):
        at = (row * PER_TOKEN + k) * HIDDEN + i
        total += tl.load(shares_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * HIDDEN + i, total.to(out_ptr.dtype.element_ty), mask=inside)
