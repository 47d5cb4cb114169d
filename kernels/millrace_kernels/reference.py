"""The oracle: every kernel in plain torch and float64, one sequence and one loop at a time.

Slow on purpose. Tests hold the other backends to it. Shape letters: n tokens, h q heads, k kv
heads, d head_dim, p positions of one sequence's K/V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan


def gather_kv(kv_layer: Tensor, pages: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence as [kv_heads, kv_len, head_dim], copied out of its pages.

    kv_layer: [pages, 2, kv_heads, page_tokens, head_dim]; pages: int [max_pages], in order.
    """
    page_tokens = kv_layer.shape[3]
    used = pages[: -(-kv_len // page_tokens)].to(kv_layer.device, torch.int64)
    # [pages, 2, k, t, d] -> [2, k, pages * t, d]
    flat = kv_layer.index_select(0, used).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return flat[0, :, :kv_len], flat[1, :, :kv_len]


def attention(
    plan: AttentionPlan, q_nhd: Tensor, kv_layer: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out_nhd in q's dtype and the natural-log lse_nh in float32 (-inf on empty rows)."""
    out_nhd = torch.zeros_like(q_nhd)
    lse_nh = torch.full(q_nhd.shape[:2], float("-inf"), dtype=torch.float32, device=q_nhd.device)
    group = plan.num_q_heads // plan.num_kv_heads
    for index, (start, stop, kv_len) in enumerate(plan.sequences):
        if start == stop or kv_len == 0:
            continue
        k_kpd, v_kpd = gather_kv(kv_layer, plan.page_table[index], kv_len)
        k_hpd = k_kpd.double().repeat_interleave(group, 0)
        v_hpd = v_kpd.double().repeat_interleave(group, 0)
        q_hnd = q_nhd[start:stop].double().transpose(0, 1)
        scores_hnp = q_hnd @ k_hpd.transpose(1, 2) * scale
        row = torch.arange(kv_len - (stop - start), kv_len, device=q_nhd.device)[:, None]
        column = torch.arange(kv_len, device=q_nhd.device)[None, :]
        hidden = column > row
        if plan.sliding_window is not None:
            hidden |= column <= row - plan.sliding_window
        scores_hnp.masked_fill_(hidden, float("-inf"))
        out_nhd[start:stop] = (scores_hnp.softmax(-1) @ v_hpd).transpose(0, 1).to(q_nhd.dtype)
        lse_nh[start:stop] = scores_hnp.logsumexp(-1).T.float()
    return out_nhd, lse_nh


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Write row i of k and v to page slots[i] // page_tokens, row slots[i] % page_tokens."""
    page_tokens = kv_layer.shape[3]
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_tokens)
        kv_layer[page, 0, :, offset] = k_nhd[row]
        kv_layer[page, 1, :, offset] = v_nhd[row]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float64 throughout."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(
        x.dtype
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [n, 2 * i] with gate first; returns [n, i]."""
    gate, up = gate_up.double().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rope(x_nhd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation (GPT-NeoX order) of x by the angles whose cos and sin are [n, d / 2]."""
    low, high = x_nhd.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1).to(x_nhd.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for weight [out, in]."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out += bias.double()
    return out.to(x.dtype)
