"""The oracle: every kernel in plain torch and float64, one sequence and one loop at a time.

Slow on purpose. Tests compare the other backends with it. Shape letters: n tokens, h q heads, k kv
heads, d head_dim, p positions of one sequence's K/V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan


def gather_kv(kv_layer: Tensor, pages: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Copies K and V of one sequence out of its pages, as [kv_heads, kv_len, head_dim].

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
    """Returns out_nhd in float64 and the natural-log lse_nh in float32 (0 and -inf on rows that see
    nothing).
    """
    out_nhd = torch.zeros(q_nhd.shape, dtype=torch.float64, device=q_nhd.device)
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
        if plan.soft_cap is not None:
            scores_hnp = plan.soft_cap * torch.tanh(scores_hnp / plan.soft_cap)
        row, column = (at.to(q_nhd.device) for at in plan.positions(index))
        scores_hnp.masked_fill_(~visible(plan, row, column), float("-inf"))
        lse_hn = scores_hnp.logsumexp(-1)
        weights = torch.where(lse_hn.isneginf()[..., None], 0.0, scores_hnp.softmax(-1))
        out_nhd[start:stop] = (weights @ v_hpd).transpose(0, 1).to(out_nhd.dtype)
        lse_nh[start:stop] = lse_hn.T.float()
    return out_nhd, lse_nh


def visible(plan: AttentionPlan, row: Tensor, column: Tensor) -> Tensor:
    """Returns bool [rows, columns]: which K/V positions a row sees, from the positions of both."""
    seen = torch.ones(row.shape[0], column.shape[0], dtype=torch.bool, device=row.device)
    if plan.causal:
        seen &= column[None, :] <= row[:, None]
    if plan.sliding_window is not None:
        seen &= column[None, :] > row[:, None] - plan.sliding_window
    return seen


def merge_attention(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges two partial results over disjoint K/V: (out float64, lse float32)."""
    lse = torch.logaddexp(lse_nh.double(), other_lse_nh.double())
    share, other_share = (
        (part.double() - lse).exp().nan_to_num(0.0)[..., None] for part in (lse_nh, other_lse_nh)
    )
    return out_nhd.double() * share + other_out_nhd.double() * other_share, lse.float()


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Writes row i of k and v to page slots[i] // page_tokens, row slots[i] % page_tokens."""
    page_tokens = kv_layer.shape[3]
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_tokens)
        kv_layer[page, 0, :, offset] = k_nhd[row]
        kv_layer[page, 1, :, offset] = v_nhd[row]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the root-mean-square norm over the last dimension, in float64 throughout."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(
        x.dtype
    )


def choose_experts(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Returns ids [n, per_token] and float64 weights; of equal ones the lowest id comes first."""
    shares = logits.double().softmax(-1)
    shares, order = torch.sort(shares, stable=True, dim=-1, descending=True)
    weights, ids = shares[:, :per_token], order[:, :per_token]
    return ids, weights / weights.sum(-1, keepdim=True) if normalised else weights


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [n, i], for gate_up [n, 2 * i] with gate first."""
    gate, up = gate_up.double().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rope(x_nhd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x by half-rotation (GPT-NeoX order); cos and sin of the angles are [n, d / 2]."""
    low, high = x_nhd.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1).to(x_nhd.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias for weight [out, in]."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out += bias.double()
    return out.to(x.dtype)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns ids int64 [b] and peaks float32 [b], row by row as `api.sample` describes it."""
    peaks = logits.amax(-1)
    ids = torch.empty(len(logits), dtype=torch.int64)
    columns = (temperatures, top_k, top_p, min_p, uniforms)
    for row, settings in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        ids[row] = draw(logits[row].double().cpu(), *settings) if peaks[row].isfinite() else 0
    return ids.to(logits.device), peaks


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """Draws one row's token: sorts the vocabulary if a filter needs it, cuts it, inverts the
    CDF.
    """
    ranking = logits.sort(descending=True, stable=True).indices
    if temperature == 0:
        return int(ranking[0])
    filtered = top_k > 0 or top_p < 1 or min_p > 0
    order = ranking[: top_k or None] if filtered else torch.arange(len(logits))
    weights = ((logits[order] - logits.max()) / temperature).exp()
    if filtered:
        before = weights.cumsum(0) - weights
        kept = weights >= min_p
        if top_p < 1:
            kept &= before < top_p * weights.sum()
        kept[0] = True
        order, weights = order[kept], weights[kept]
    cumulative = weights.cumsum(0)
    return int(order[torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)])
