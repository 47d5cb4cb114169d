"""The kernels that the engine calls. Each call goes to the fastest backend for its device and size.

K/V always lies in pages, also in a ring's buffers and at a KVP worker.
Shape letters: n tokens of all sequences, h q heads, k kv heads, d head_dim, B sequences.
A layer's K/V pool is kv_layer [pages, 2, kv_heads, page_tokens, head_dim]: K at 0, V at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_kernels import dispatch, reference, torch_backend
from millrace_kernels.linear import Experts, Linear, prepare_experts, prepare_linear
from millrace_kernels.plan import AttentionPlan, Backend, check_tables
from millrace_kernels.recording import NativeCall, record

_SETTING_TYPES = (torch.float64, torch.int64, torch.float64, torch.float64, torch.float64)

__all__ = [
    "AttentionPlan",
    "Backend",
    "Experts",
    "Linear",
    "NativeCall",
    "add_rms_norm",
    "describe_backends",
    "merge_attention_",
    "plan_attention",
    "prepare_experts",
    "prepare_linear",
    "record",
    "rms_norm",
    "rope_write_kv",
    "run_attention",
    "sample",
    "silu_mul",
]


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
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    device_table: Tensor | None = None,
) -> AttentionPlan:
    """Checks and plans one step's attention; the plan serves every layer of that step.

    q_indptr: int32 [B + 1], first query row of each sequence; kv_lens: int32 [B], K/V tokens in
    pages, with this step's tokens; page_table: int32 [B, max_pages], each sequence's pages in order
    (entries past its K/V are not read; the table must not change while the plan is in use).

    Row i of a sequence stands at position kv_len - q_len + i and slot j of its K/V holds position
    j, unless `q_positions` (int32 [n]) or `kv_positions` (int32 [sum(kv_lens)], sequence after
    sequence) say otherwise, in any order: a ring step over zigzag or striped blocks and a shard of
    a long context are plans of the same kind. A row sees positions up to its own (all, when not
    `causal`), and with `sliding_window` w only positions above its own - w. `soft_cap` c bends
    scaled scores to c tanh(score / c).

    `device_table`: a copy of page_table that is on the device already, for backends that would
    otherwise copy it; its rows may be further apart, and entries that are not read may differ.

    Raises ValueError when tables disagree, heads don't divide, or a backend can't do it.
    """
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}")
    q_indptr, kv_lens = q_indptr.cpu().contiguous(), kv_lens.cpu().contiguous()
    q_positions, kv_positions = (
        None if table is None else table.cpu().contiguous() for table in (q_positions, kv_positions)
    )
    plan = AttentionPlan(
        backend=Backend(backend),
        native=None,
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        page_table=page_table,
        q_positions=q_positions,
        kv_positions=kv_positions,
        sequences=check_tables(
            q_indptr, kv_lens, page_table, page_tokens, q_positions, kv_positions
        ),
        page_tokens=page_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        device_table=device_table,
    )
    return dispatch.with_backend(plan)


def run_attention(
    plan: AttentionPlan,
    q_nhd: Tensor,
    kv_layer: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, num_q_heads, head_dim] over one layer's pages: (out_nhd, lse_nh).

    out: written and returned when given; of the plan's dtype, or float32, which keeps all bits of
    partial results until they are merged. lse_out: float32 [n, num_q_heads], the natural-log sum of
    exponentials of each row's scaled scores. A row that sees no position has out 0 and lse -inf.
    Raises ValueError when q, the pages or the outputs don't fit the plan.
    """
    expected = _shape_of(plan, q_nhd, kv_layer)
    if out is None:
        out = torch.empty(expected, dtype=q_nhd.dtype, device=q_nhd.device)
    elif (
        out.shape != expected
        or out.dtype not in (plan.dtype, torch.float32)
        or not out.is_contiguous()
    ):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, the plan has {expected}")
    if lse_out is None:
        lse_out = torch.empty(expected[:2], dtype=torch.float32, device=q_nhd.device)
    elif (
        lse_out.shape != expected[:2]
        or lse_out.dtype != torch.float32
        or not lse_out.is_contiguous()
    ):
        raise ValueError(f"lse_out is {lse_out.dtype} {tuple(lse_out.shape)}, not float32 [n, h]")
    if plan.backend is Backend.REFERENCE:
        result, lse_nh = reference.attention(plan, q_nhd, kv_layer, scale=scale)
        return out.copy_(result), lse_out.copy_(lse_nh)
    if plan.native is not None:
        dispatch.run_native(plan, q_nhd, kv_layer, scale=scale, out_nhd=out, lse_nh=lse_out)
    if plan.native is None:
        torch_backend.attention(plan, q_nhd, kv_layer, scale=scale, out_nhd=out, lse_nh=lse_out)
    return out, lse_out


def _shape_of(plan: AttentionPlan, q_nhd: Tensor, kv_layer: Tensor) -> tuple[int, int, int]:
    """Returns [n, h, d] of q and out, after the check that q and the pages fit the plan."""
    expected = (plan.num_tokens, plan.num_q_heads, plan.head_dim)
    if tuple(q_nhd.shape) != expected or q_nhd.dtype != plan.dtype:
        raise ValueError(f"q is {q_nhd.dtype} {tuple(q_nhd.shape)}, the plan has {expected}")
    page = (2, plan.num_kv_heads, plan.page_tokens, plan.head_dim)
    if kv_layer.shape[1:] != page or kv_layer.dtype != plan.dtype:
        raise ValueError(f"kv_layer's pages are {tuple(kv_layer.shape[1:])}, the plan has {page}")
    if not q_nhd.device.type == kv_layer.device.type == plan.device.type:
        raise ValueError(
            f"q is on {q_nhd.device} and the pages on {kv_layer.device}, the plan on {plan.device}"
        )
    return expected


def merge_attention_(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> None:
    """Merges a partial result over other K/V into out_nhd [n, h, d] and lse_nh [n, h], IN PLACE.

    Sums in float32; the two outs may differ in dtype. Rows of either side may have seen no position
    (lse -inf). Raises ValueError when shapes differ.
    """
    if out_nhd.shape != other_out_nhd.shape or out_nhd.shape[:2] != lse_nh.shape:
        raise ValueError(f"out is {tuple(out_nhd.shape)}, the other {tuple(other_out_nhd.shape)}")
    same = lse_nh.shape == other_lse_nh.shape
    if not same or not lse_nh.dtype == other_lse_nh.dtype == torch.float32:
        raise ValueError(
            f"lse is {lse_nh.dtype} {tuple(lse_nh.shape)}, "
            f"the other {other_lse_nh.dtype} {tuple(other_lse_nh.shape)}"
        )
    rows = dispatch.rows(out_nhd)
    if dispatch.rows(other_out_nhd) is not rows:  # of a dtype that only torch supports
        rows = torch_backend
    rows.merge_attention_(out_nhd, lse_nh, other_out_nhd, other_lse_nh)


def rope_write_kv(  # noqa: PLR0913 - one argument for each thing that fixes the call
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    *,
    num_q_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotates q and k of qkv [n, h + 2k, d], writes k and v into a layer's pages, and returns q.

    q is rotated IN PLACE and returned as the view [n, h, d]; k's memory is undefined afterwards.
    Half-rotation (GPT-NeoX order) by cos, sin float32 [n, d / 2], each row the angles of that
    token's position. q and k are RMS-normed per head first where q_norm and k_norm [d] are given
    (Qwen3). slots: int64 [n], page * page_tokens + offset of each row; no slot may occur twice.

    Raises ValueError when shapes or dtypes disagree, and IndexError for a slot outside the pool.
    Triton does not raise: it leaves such a row unwritten, so that the host need not wait.
    """
    return dispatch.rows(qkv).rope_write_kv(
        qkv,
        cos,
        sin,
        kv_layer,
        slots,
        num_q_heads=num_q_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the root-mean-square norm over the last dimension, float32 inside; weight:
    [x.shape[-1]].
    """
    return dispatch.rows(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(residual + x), residual + x); the sum is rounded to x's dtype first."""
    return dispatch.rows(x).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [..., i], for gate_up [..., 2 * i] with gate in the first half."""
    return dispatch.rows(gate_up).silu_mul(gate_up)


def choose_experts(logits: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Chooses the likeliest experts of each row of logits [n, E] by a softmax in float32.

    Returns ids int64 and weights float32 [n, per_token], the likeliest first. A weight is the
    expert's probability; if `normalised`, a row's weights are divided by their sum. Raises
    ValueError unless 0 < per_token <= E.
    """
    if logits.dim() != 2 or not 0 < per_token <= logits.shape[1]:
        raise ValueError(f"{per_token} experts of logits {tuple(logits.shape)}")
    return dispatch.rows(logits).choose_experts(logits, per_token, normalised)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row of logits (float32 [b, vocab]): ids int64 [b], and peaks float32
    [b].

    The settings are [b] on the host, one per row: temperatures (0: greedy), top_p (1: all), min_p
    (0: off) and uniforms in [0, 1) float64, top_k int64 (0: all). Tokens are ranked by logit, equal
    logits by lowest id. `top_k` keeps the first tokens; of these `top_p` keeps the fewest whose
    mass reaches that share; of these `min_p` keeps the tokens at least that likely relative to the
    likeliest. The CDF of the kept tokens, in that order, is inverted at the row's uniform; without
    a filter the order is by id. Sums are float64, so two implementations agree unless a threshold
    lies within rounding (1e-12 or so) of a running sum; each alone gives a row the same token in
    every batch and on any number of threads.

    peaks are the rows' largest logits, NaN where any is. Where a peak isn't finite the id is
    meaningless, and the caller must refuse the row. Raises ValueError when shapes or dtypes
    disagree.
    """
    settings = (temperatures, top_k, top_p, min_p, uniforms)
    for column, dtype in zip(settings, _SETTING_TYPES, strict=True):
        if column.shape != logits.shape[:1] or column.dtype != dtype or not column.is_cpu:
            raise ValueError(
                f"a setting is {column.dtype} {tuple(column.shape)} on {column.device}, "
                f"sampling from logits {tuple(logits.shape)} needs {dtype} on the host"
            )
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits must be float32 [b, vocab], got {logits.dtype} {tuple(logits.shape)}"
        )
    draw = dispatch.rows(logits).sample
    return draw(logits, temperatures, top_k, top_p, min_p, uniforms)


def describe_backends() -> str:
    """Describes in one line the backends of this machine, and why others are missing, for logs."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"kernels: torch {torch.__version__} ({device}), {dispatch.describe()}"
