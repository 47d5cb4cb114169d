"""The kernels that the engine calls, each sent to the fastest backend for its device and size.

Shape letters: n tokens of all sequences, h q heads, k kv heads, d head_dim, B sequences.
A layer's K/V pool is kv_layer [pages, 2, kv_heads, page_tokens, head_dim]: K at 0, V at 1.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from millrace_kernels import cpu_backend, reference, torch_backend
from millrace_kernels.plan import AttentionPlan, Backend, check_tables

_NATIVE_ROWS = 8
"""Query rows of a sequence up to which the C++ kernel beats torch's split of a prefill chunk."""

_ALL_ROWS = 2**31 - 1

_SKINNY_ROWS = 8
"""Rows of x up to which the C++ linear, bound by reading the weights, beats a packed GEMM."""


def plan_attention(  # noqa: PLR0913 - one argument for each thing that fixes the call
    *,
    q_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    page_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    sliding_window: int | None = None,
    backend: str = "auto",
) -> AttentionPlan:
    """Check and plan one step's attention; the plan serves every layer of that step.

    q_indptr: int32 [B + 1], first query row of each sequence; kv_lens: int32 [B], K/V tokens
    in pages, those of this step included; page_table: int32 [B, max_pages], each sequence's
    pages in order (entries past its K/V are not read). Causal is bottom-right aligned: query
    row i of a sequence stands at position kv_len - q_len + i. With `sliding_window` w, a row
    sees itself and the w - 1 positions before it.

    Raises ValueError when tables disagree, heads don't divide, or a backend can't do it.
    """
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads {num_q_heads} is no multiple of num_kv_heads {num_kv_heads}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    q_indptr, kv_lens, page_table = (
        table.cpu().contiguous() for table in (q_indptr, kv_lens, page_table)
    )
    where = torch.device(device)
    chosen, native_rows = _choose(Backend(backend), where, dtype)
    plan = AttentionPlan(
        backend=chosen,
        native_rows=native_rows,
        native=None,
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        page_table=page_table,
        sequences=check_tables(q_indptr, kv_lens, page_table, page_tokens),
        page_tokens=page_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=where,
        sliding_window=sliding_window,
    )
    if native_rows == 0:
        return plan
    return dataclasses.replace(plan, native=cpu_backend.plan(plan))


def _choose(wanted: Backend, device: torch.device, dtype: torch.dtype) -> tuple[Backend, int]:
    """The backend, and the most query rows of a sequence that C++ takes."""
    able = cpu_backend.takes_dtype(device, dtype)
    if wanted is Backend.AUTO:
        return (Backend.CPU, _NATIVE_ROWS) if able else (Backend.TORCH, 0)
    if wanted is Backend.CPU:
        if not able:
            raise ValueError(
                f"attention backend 'cpu' can't do {dtype} on {device}: {cpu_backend.describe()}"
            )
        return Backend.CPU, _ALL_ROWS
    return wanted, 0


def run_attention(
    plan: AttentionPlan,
    q_nhd: Tensor,
    kv_layer: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> Tensor:
    """Attention of q [n, num_q_heads, head_dim] over one layer's pages; returns out_nhd.

    out: written and returned when given. lse_out: float32 [n, num_q_heads], filled with the
    natural-log sum of exponentials of each row's scaled scores (-inf where a row sees nothing).
    Raises ValueError when q or the pages don't fit the plan.
    """
    expected = (plan.num_tokens, plan.num_q_heads, plan.head_dim)
    if q_nhd.shape != expected or q_nhd.dtype != plan.dtype:
        raise ValueError(f"q is {q_nhd.dtype} {tuple(q_nhd.shape)}, the plan has {expected}")
    page = (2, plan.num_kv_heads, plan.page_tokens, plan.head_dim)
    if kv_layer.shape[1:] != page or kv_layer.dtype != plan.dtype:
        raise ValueError(f"kv_layer's pages are {tuple(kv_layer.shape[1:])}, the plan has {page}")
    if out is None:
        out = torch.empty(expected, dtype=q_nhd.dtype, device=q_nhd.device)
    elif out.shape != expected or out.dtype != plan.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, the plan has {expected}")
    if lse_out is not None and (
        lse_out.shape != expected[:2]
        or lse_out.dtype != torch.float32
        or not lse_out.is_contiguous()
    ):
        raise ValueError(f"lse_out is {lse_out.dtype} {tuple(lse_out.shape)}, not float32 [n, h]")
    if plan.backend is Backend.REFERENCE:
        result, lse_nh = reference.attention(plan, q_nhd, kv_layer, scale=scale)
        out.copy_(result)
        if lse_out is not None:
            lse_out.copy_(lse_nh)
        return out
    if plan.native is not None:
        cpu_backend.attention(
            plan.native, q_nhd, kv_layer, scale=scale, out_nhd=out, lse_nh=lse_out
        )
    torch_backend.attention(plan, q_nhd, kv_layer, scale=scale, out_nhd=out, lse_nh=lse_out)
    return out


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Write k and v [n, kv_heads, head_dim] into a layer's pages.

    slots: int64 [n], page * page_tokens + offset of each row; no slot may occur twice.
    """
    write = cpu_backend.write_kv if cpu_backend.takes(kv_layer) else torch_backend.write_kv
    write(kv_layer, k_nhd, v_nhd, slots)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, float32 inside; weight: [x.shape[-1]]."""
    if cpu_backend.takes(x):
        return cpu_backend.rms_norm(x, weight, eps)[0]
    return torch_backend.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(residual + x), residual + x); the sum is rounded to x's dtype first."""
    if cpu_backend.takes(x):
        return cpu_backend.rms_norm(x, weight, eps, residual)
    total = residual + x
    return torch_backend.rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * i] with gate in the first half; returns [..., i]."""
    if cpu_backend.takes(gate_up):
        return cpu_backend.silu_mul(gate_up)
    return torch_backend.silu_mul(gate_up)


def apply_rope(q_nhd: Tensor, k_nhd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k IN PLACE by half-rotation (GPT-NeoX order) and return them.

    cos, sin: float32 [n, head_dim / 2], each row the angles of that token's position.
    """
    rotate = cpu_backend.rope_ if cpu_backend.takes(q_nhd) else torch_backend.rope_
    rotate(q_nhd, cos, sin)
    rotate(k_nhd, cos, sin)
    return q_nhd, k_nhd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias [out]."""
    rows = x.numel() // max(x.shape[-1], 1)
    if 0 < rows <= _SKINNY_ROWS and cpu_backend.takes(x) and weight.is_contiguous():
        return cpu_backend.linear(x, weight, bias)
    out: Tensor = functional.linear(x, weight, bias)
    return out


def describe_backends() -> str:
    """One line on which backends this machine has, for logs and `millrace doctor`."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"kernels: torch {torch.__version__} ({device}), {cpu_backend.describe()}"
