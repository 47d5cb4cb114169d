"""Every kernel in torch operators: runs on the CPU and on CUDA.

The library under torch chooses its kernels by the shapes of a product. So the CPU gets products of
one shape alone where the kernels are deterministic, whatever the number of rows.

Shape letters: n tokens, h q heads, k kv heads, d head_dim, p positions of one sequence's K/V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from millrace_kernels import determinism
from millrace_kernels.plan import AttentionPlan
from millrace_kernels.reference import gather_kv, visible
from millrace_kernels.router import choose_experts as choose_experts
from millrace_kernels.torch_backend.sampling import sample as sample

_BLOCK_ROWS = 512
"""Query rows that share one mask, unless products have one shape."""

_EQUAL_ROWS = 16
"""Rows of x, or of q, of every deterministic product; zeros fill up the last."""

_EQUAL_SLOTS = 512
"""K/V slots of every deterministic product."""


def attention(
    plan: AttentionPlan,
    q_nhd: Tensor,
    kv_layer: Tensor,
    *,
    scale: float,
    out_nhd: Tensor,
    lse_nh: Tensor,
) -> None:
    """Fills out_nhd and lse_nh, one sequence after another."""
    for index, (start, stop, kv_len) in enumerate(plan.sequences):
        if kv_len == 0 or start == stop:
            out_nhd[start:stop] = 0
            lse_nh[start:stop] = float("-inf")
            continue
        k_kpd, v_kpd = gather_kv(kv_layer, plan.page_table[index], kv_len)
        q_hnd = q_nhd[start:stop].transpose(0, 1)
        blocks = _equal_blocks if q_hnd.is_cpu and determinism.is_on() else _blocks
        o_hnd, lse_hn = blocks(plan, index, q_hnd, k_kpd, v_kpd, scale)
        out_nhd[start:stop] = o_hnd.transpose(0, 1)
        lse_nh[start:stop] = lse_hn.transpose(0, 1)


def _blocks(
    plan: AttentionPlan, index: int, q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes blocks of query rows, each under its mask and over only the K/V that it can see."""
    row, column = (at.to(q_hnd.device) for at in plan.positions(index))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for first in range(0, len(row), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        seen = visible(plan, row[rows], column)
        used = seen.any(0).nonzero()
        span = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
        out, lse = _masked(
            q_hnd[:, rows], k_kpd[:, span], v_kpd[:, span], scale, plan.soft_cap, seen[:, span]
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _equal_blocks(
    plan: AttentionPlan, index: int, q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes blocks of _EQUAL_ROWS rows over spans of _EQUAL_SLOTS slots, merged in order."""
    row, column = plan.positions(index)
    rows, slots = len(row), len(column)
    q_hnd = pad(q_hnd, (0, 0, 0, -rows % _EQUAL_ROWS))
    k_kpd, v_kpd = (pad(x, (0, 0, 0, -slots % _EQUAL_SLOTS)) for x in (k_kpd, v_kpd))
    out_nhd = q_hnd.new_zeros((q_hnd.shape[1], *q_hnd.shape[::2]), dtype=torch.float32)
    lse_nh = out_nhd.new_full(out_nhd.shape[:2], float("-inf"))
    for first in range(0, rows, _EQUAL_ROWS):
        own = slice(first, first + _EQUAL_ROWS)
        seen = visible(plan, row[own], column)
        seen = pad(seen, (0, -slots % _EQUAL_SLOTS, 0, _EQUAL_ROWS - len(seen)))
        for slot in range(0, slots, _EQUAL_SLOTS):
            span = slice(slot, slot + _EQUAL_SLOTS)
            if seen[:, span].any():
                part, part_lse = _masked(
                    # In one layout: strides may choose the library's kernel.
                    q_hnd[:, own].contiguous(),
                    k_kpd[:, span].contiguous(),
                    v_kpd[:, span].contiguous(),
                    scale,
                    plan.soft_cap,
                    seen[:, span],
                )
                merge_attention_(
                    out_nhd[own], lse_nh[own], part.transpose(0, 1), part_lse.transpose(0, 1)
                )
    return out_nhd[:rows].transpose(0, 1), lse_nh[:rows].transpose(0, 1)


def _masked(
    q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float, soft_cap: float | None, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes plain softmax attention under a mask: out_hnd and lse_hn, both float32."""
    heads, rows, _ = q_hnd.shape
    kv_heads = k_kpd.shape[0]
    grouped = q_hnd.float().reshape(kv_heads, heads // kv_heads, rows, -1)
    scores = grouped @ k_kpd.float()[:, None].transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores.masked_fill_(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = weights @ v_kpd.float()[:, None]
    return out.flatten(0, 1), lse.reshape(heads, rows)


def merge_attention_(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> None:
    """Merges another partial result into out_nhd and lse_nh, in float32 inside."""
    lse = torch.logaddexp(lse_nh, other_lse_nh)
    finite = lse.nan_to_num(neginf=0.0)
    merged = out_nhd.float() * (lse_nh - finite).exp()[..., None]
    merged += other_out_nhd.float() * (other_lse_nh - finite).exp()[..., None]
    out_nhd.copy_(merged)
    lse_nh.copy_(lse)


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Scatters the rows of k and v into their pages."""
    page_tokens = kv_layer.shape[3]
    page, offset = slots // page_tokens, slots % page_tokens
    kv_layer[page, 0, :, offset] = k_nhd
    kv_layer[page, 1, :, offset] = v_nhd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Returns x [n, H] @ weight [O, H].T + bias [O], in `out` [n, O] where it is given."""
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    elif out.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(f"out is {tuple(out.shape)}, not {(x.shape[0], weight.shape[0])}")
    if not x.is_cpu or not determinism.is_on():
        return _product(x, weight, bias, out)
    block = x.new_zeros((_EQUAL_ROWS, weight.shape[1]))
    result = out.new_empty((_EQUAL_ROWS, out.shape[1]))
    for first in range(0, len(x), _EQUAL_ROWS):
        rows = x[first : first + _EQUAL_ROWS]
        block[: len(rows)] = rows
        out[first : first + len(rows)] = _product(block, weight, bias, result)[: len(rows)]
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the norm of Hugging Face's Llama: float32 inside, rounded to x's dtype before the
    weight.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(total), total) for total = residual + x, which may be the residual."""
    total = torch.add(residual, x, out=total)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [n, i], for gate_up [n, 2 * i] with gate first."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def rope_(x_nhd: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates x in place, in float32 inside."""
    low, high = x_nhd.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    x_nhd.copy_(torch.cat([low * c - high * s, high * c + low * s], -1))


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
    """Norms and rotates q and k of qkv [n, h + 2k, d] in place, then scatters k and v."""
    kv_heads = kv_layer.shape[2]
    q_nhd, k_nhd, v_nhd = qkv.split_with_sizes((num_q_heads, kv_heads, kv_heads), 1)
    for x_nhd, weight in ((q_nhd, q_norm), (k_nhd, k_norm)):
        if weight is not None:
            x_nhd.copy_(rms_norm(x_nhd, weight, eps))
        rope_(x_nhd, cos, sin)
    write_kv(kv_layer, k_nhd, v_nhd, slots)
    return q_nhd
