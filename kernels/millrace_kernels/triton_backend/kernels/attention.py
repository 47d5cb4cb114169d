"""Paged attention in Triton: one kernel for prefill, decode and partial results, and the merges.

A program takes one work item (rows of one sequence and a range of its K/V slots) and one K/V head.
The GROUP query heads of that K/V head are rows of the same tile, so that K/V is read once for all
of them. The part of the range that every row sees whole is walked without masks (most of a long
history), the rest with masks. Scores are in base 2; the returned lse is natural.

Sources: FlashAttention-2 (Dao 2023, section 3.1: one division at the end); Flash-Decoding (Dao et
al. 2023: K/V split over programs, partial results merged by their log-sum-exp).
"""

# ruff: noqa: PLR0913, PLR0915 - a kernel's arguments are all that reaches it, and its body is one piece.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

WORK_FIELDS = tl.constexpr(9)
"""Fields of a work item: sequence, first row, rows, first slot, last slot + 1, the same two of the
part that every row sees, the start of the sequence's `kv_positions`, first partial row (-1: into
out).
"""

MERGE_FIELDS = tl.constexpr(4)
"""Fields of a merge: row of out, first partial row, distance to the next one, number of rows."""


@jit()
def _load_tile(
    base_ptr: tl.tensor,
    at: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    tile_ptr = base_ptr + at[:, None] + d[None, :]
    if MASKED:
        tile = tl.load(tile_ptr, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(tile_ptr)
    return tile


@jit()
def _fold_block(
    state: tl.tuple,
    q: tl.tensor,
    q_position: tl.tensor,
    first: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    d: tl.tensor,
    pages_ptr: tl.tensor,
    k_ptr: tl.tensor,
    kv_position_ptr: tl.tensor,
    page_stride: tl.tensor,
    v_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Adds one block of K/V slots to (weighted sum, highest score, sum of exponentials).

    The highest score is times `unit`, which is above 0: one multiply-add then gives an exponent.
    """
    acc, top, total = state
    slot = first + n
    inside = slot < end
    RAGGED: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
    if PAGE_TOKENS % BLOCK_N == 0:  # the block lies in one page, because it is aligned
        page = tl.load(pages_ptr + first // PAGE_TOKENS).to(tl.int64)
        at = page * page_stride + (first % PAGE_TOKENS + n) * slot_stride
    else:
        page = tl.load(pages_ptr + slot // PAGE_TOKENS, mask=inside, other=0).to(tl.int64)
        at = page * page_stride + (slot % PAGE_TOKENS) * slot_stride
    k = _load_tile(k_ptr, at, d, inside, HEAD_DIM, RAGGED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    unit = scale * LOG2E
    if CAPPED:
        # tanh by exp: exact at both ends, where exp gives 0 or infinity.
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(scores * (scale * 2.0 / soft_cap)) + 1.0))
        unit = LOG2E
    if MASKED:
        seen = inside[None, :]
        kv_position = slot
        if PLACED:
            kv_position = tl.load(kv_position_ptr + slot, mask=inside, other=0)
        if CAUSAL:
            seen = seen & (kv_position[None, :] <= q_position[:, None])
        if WINDOWED:
            seen = seen & (kv_position[None, :] > q_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - base[:, None])
    decay = tl.exp2(top - base)
    v = _load_tile(k_ptr + v_stride, at, d, inside, HEAD_DIM, RAGGED)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total * decay + tl.sum(weights, 1)


@jit("table_stride", "window")
def attend(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    work_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    q_position_ptr: tl.tensor,
    kv_position_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    page_stride: tl.tensor,
    v_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (work items, kv_heads). q [n, h, d] strided; out [n, h, d] and lse [n, h] contiguous."""
    work_ptr += tl.program_id(0) * WORK_FIELDS
    sequence = tl.load(work_ptr).to(tl.int64)
    first_row = tl.load(work_ptr + 1)
    rows = tl.load(work_ptr + 2)
    begin = tl.load(work_ptr + 3)
    end = tl.load(work_ptr + 4)
    full_begin = tl.load(work_ptr + 5)
    full_end = tl.load(work_ptr + 6)
    kv_position_ptr += tl.load(work_ptr + 7)
    partial_row = tl.load(work_ptr + 8)
    kv_head = tl.program_id(1)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    live = m // GROUP < rows
    row = (first_row + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    present = live[:, None] & (d < HEAD_DIM)[None, :]
    q_at = row * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=present, other=0.0)
    q_position = tl.load(q_position_ptr + row, mask=live, other=0)

    pages_ptr = page_table_ptr + sequence * table_stride
    k_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    state = (acc, top, total)
    n = tl.arange(0, BLOCK_N)
    for first in range(full_begin, full_end, BLOCK_N):
        state = _fold_block(
            state, q, q_position, first, n, end, d, pages_ptr, k_ptr, kv_position_ptr,
            page_stride, v_stride, slot_stride, scale, soft_cap, window, HEAD_DIM, BLOCK_D, BLOCK_N,
            PAGE_TOKENS, CAUSAL, WINDOWED, CAPPED, PLACED, PRECISION, False,
        )  # fmt: skip
    before = tl.cdiv(full_begin - begin, BLOCK_N)
    for i in range(before + tl.cdiv(end - full_end, BLOCK_N)):
        first = tl.where(i < before, begin + i * BLOCK_N, full_end + (i - before) * BLOCK_N)
        state = _fold_block(
            state, q, q_position, first, n, end, d, pages_ptr, k_ptr, kv_position_ptr,
            page_stride, v_stride, slot_stride, scale, soft_cap, window, HEAD_DIM, BLOCK_D, BLOCK_N,
            PAGE_TOKENS, CAUSAL, WINDOWED, CAPPED, PLACED, PRECISION, True,
        )  # fmt: skip

    acc, top, total = state
    divisor = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, top * LN2 + tl.log(divisor), float("-inf"))
    acc = acc / divisor[:, None]
    heads = tl.num_programs(1) * GROUP
    if partial_row < 0:
        at = row * heads + head
        tl.store(lse_ptr + at, lse, mask=live)
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * HEAD_DIM + d[None, :], out, mask=present)
    else:
        at = (partial_row + m // GROUP).to(tl.int64) * heads + head
        tl.store(partial_lse_ptr + at, lse, mask=live)
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], acc, mask=present)


@jit()
def merge_pieces(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    merge_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Grid (rows to merge, h): merges a row's pieces, BLOCK_P at a time, into its row of out and
    lse. A merge of no pieces writes nothing.
    """
    merge_ptr += tl.program_id(0) * MERGE_FIELDS
    row = tl.load(merge_ptr).to(tl.int64)
    first = tl.load(merge_ptr + 1).to(tl.int64)
    stride = tl.load(merge_ptr + 2)
    pieces = tl.load(merge_ptr + 3)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, pieces, BLOCK_P):
        piece = start + tl.arange(0, BLOCK_P)
        there = piece < pieces
        at = (first + piece * stride) * heads + head
        lse = tl.load(partial_lse_ptr + at, mask=there, other=float("-inf"))
        present = there[:, None] & (d < HEAD_DIM)[None, :]
        out_pd = tl.load(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=present, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(lse - base)
        decay = tl.exp(top - base)
        acc = acc * decay + tl.sum(out_pd * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    at = row * heads + head
    lse = tl.where(total > 0, top + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + at, lse, mask=pieces > 0)
    out = (acc / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at * HEAD_DIM + d, out, mask=d < tl.where(pieces > 0, HEAD_DIM, 0))


@jit()
def merge_partial(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    other_ptr: tl.tensor,
    other_lse_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (n * h,): merges the other's row of [n, h, d] and [n, h] into out's, all contiguous."""
    at = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    own = tl.load(lse_ptr + at)
    new = tl.load(other_lse_ptr + at)
    top = tl.maximum(own, new)
    base = tl.where(top == float("-inf"), 0.0, top)
    own_weight = tl.exp(own - base)
    new_weight = tl.exp(new - base)
    total = own_weight + new_weight
    divisor = tl.where(total > 0, total, 1.0)
    out_at = out_ptr + at * HEAD_DIM + d
    out = tl.load(out_at, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + at * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    out = (out * own_weight + other * new_weight) / divisor
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + at, tl.where(total > 0, base + tl.log(divisor), float("-inf")))
