"""Every kernel in torch operators: runs on the CPU and on CUDA, and is fastest for long prefill.

Shape letters: n tokens, h q heads, k kv heads, d head_dim, p positions of one sequence's K/V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from millrace_kernels.plan import AttentionPlan
from millrace_kernels.reference import gather_kv

_WINDOW_BLOCK_TOKENS = 512
"""Query rows that share one mask when a window hides part of the K/V."""


def attention(
    plan: AttentionPlan,
    q_nhd: Tensor,
    kv_layer: Tensor,
    *,
    scale: float,
    out_nhd: Tensor,
    lse_nh: Tensor | None,
) -> None:
    """Fill out_nhd, and lse_nh where asked for, one sequence after another.

    Leaves out the sequences that the plan gives to the C++ kernel.
    """
    for index, (start, stop, kv_len) in enumerate(plan.sequences):
        if stop - start <= plan.native_rows:
            continue
        if kv_len == 0:
            out_nhd[start:stop] = 0
            if lse_nh is not None:
                lse_nh[start:stop] = float("-inf")
            continue
        k_kpd, v_kpd = gather_kv(kv_layer, plan.page_table[index], kv_len)
        q_hnd = q_nhd[start:stop].transpose(0, 1)
        o_hnd, lse_hn = _one_sequence(
            q_hnd, k_kpd, v_kpd, scale, plan.sliding_window, lse_nh is not None
        )
        out_nhd[start:stop] = o_hnd.transpose(0, 1)
        if lse_nh is not None and lse_hn is not None:
            lse_nh[start:stop] = lse_hn.transpose(0, 1)


def _one_sequence(
    q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float, window: int | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    rows, length = q_hnd.shape[1], k_kpd.shape[1]
    if window is not None and window < length:
        return _windowed(q_hnd, k_kpd, v_kpd, scale, window)
    if q_hnd.device.type == "cpu":
        return _cpu_causal(q_hnd, k_kpd, v_kpd, scale)
    if want_lse:
        return _masked(q_hnd, k_kpd, v_kpd, scale, _causal_mask(rows, length, None, q_hnd.device))
    mask = None if rows in (1, length) else _causal_mask(rows, length, None, q_hnd.device)
    out = functional.scaled_dot_product_attention(
        q_hnd[None],
        k_kpd[None],
        v_kpd[None],
        attn_mask=mask,
        is_causal=rows == length and rows > 1,
        scale=scale,
        enable_gqa=True,
    )
    return out[0], None


def _causal_mask(rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query row may look: [rows, length], the last row at the last position."""
    row = torch.arange(length - rows, length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    seen = column <= row
    if window is not None:
        seen &= column > row - window
    return seen


def _masked(
    q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in float32 under a mask, with lse_hn."""
    heads, rows, _ = q_hnd.shape
    kv_heads = k_kpd.shape[0]
    grouped = q_hnd.float().reshape(kv_heads, heads // kv_heads, rows, -1)
    scores = grouped @ k_kpd.float()[:, None].transpose(-1, -2) * scale
    scores.masked_fill_(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]) @ v_kpd.float()[:, None]
    return out.flatten(0, 1).to(q_hnd.dtype), lse.reshape(heads, rows)


def _windowed(
    q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Blocks of query rows, each over just the K/V that its rows can see."""
    rows, length = q_hnd.shape[1], k_kpd.shape[1]
    outs, lses = [], []
    for first in range(0, rows, _WINDOW_BLOCK_TOKENS):
        last = min(first + _WINDOW_BLOCK_TOKENS, rows)
        end = length - rows + last
        begin = max(0, end - (last - first) - window + 1)
        seen = _causal_mask(last - first, end - begin, window, q_hnd.device)
        out, lse = _masked(
            q_hnd[:, first:last], k_kpd[:, begin:end], v_kpd[:, begin:end], scale, seen
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _flash(
    q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Torch's CPU flash kernel; its causal mask starts at the top left, so lengths must be equal.

    Returns out_hnd and the natural-log lse_hn.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_hnd[None], k_kpd[None], v_kpd[None], 0.0, causal, attn_mask=None, scale=scale
    )
    return out[0], lse[0]


def _cpu_causal(q_hnd: Tensor, k_kpd: Tensor, v_kpd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Bottom-right causal: all of the history, then the square diagonal, merged by their lse."""
    rows, length = q_hnd.shape[1], k_kpd.shape[1]
    history = length - rows
    if history == 0:
        return _flash(q_hnd, k_kpd, v_kpd, scale, causal=True)
    if rows == 1:
        return _flash(q_hnd, k_kpd, v_kpd, scale, causal=False)
    old, old_lse = _flash(q_hnd, k_kpd[:, :history], v_kpd[:, :history], scale, causal=False)
    new, new_lse = _flash(q_hnd, k_kpd[:, history:], v_kpd[:, history:], scale, causal=True)
    lse = torch.logaddexp(old_lse, new_lse)
    out = old.float() * (old_lse - lse).exp()[..., None]
    out += new.float() * (new_lse - lse).exp()[..., None]
    return out.to(q_hnd.dtype), lse


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Scatter the rows of k and v into their pages."""
    page_tokens = kv_layer.shape[3]
    page, offset = slots // page_tokens, slots % page_tokens
    kv_layer[page, 0, :, offset] = k_nhd
    kv_layer[page, 1, :, offset] = v_nhd


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As Hugging Face's Llama does it: float32 inside, rounded to x's dtype before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [n, 2 * i] with gate first; returns [n, i]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def rope_(x_nhd: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place, in float32 inside."""
    low, high = x_nhd.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    x_nhd.copy_(torch.cat([low * c - high * s, high * c + low * s], -1))
