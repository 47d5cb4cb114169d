"""A matrix of few rows times a weight, in Triton: reading the weight once takes all the time."""

# ruff: noqa: PLR0913 - a kernel's arguments are all that reaches it.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit


@jit("rows")
def multiply_few_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (blocks of OUTPUTS,): out [rows, OUTPUTS] = x @ weight.T + bias.

    weight [OUTPUTS, INPUTS] is contiguous. BLOCK_M is the same for any `rows`, so that a row has
    the same bits in any batch.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * INPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        at = start + k
        inside = (at < INPUTS)[None, :]
        x = tl.load(x_at + at[None, :], mask=(m < rows)[:, None] & inside, other=0.0)
        weight = tl.load(weight_at + at[None, :], mask=(n < OUTPUTS)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    if BIASED:
        acc += tl.load(bias_ptr + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    present = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    out_at = m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=present)
