"""Runs a tiny attention call on a backend and compares it with the reference.

A package that imports may still fail at its first plan: FlashInfer compiles modules that are not
prebuilt, which needs a compiler. So AUTO tries a backend before it uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Final

import torch

from millrace_kernels import reference
from millrace_kernels.plan import AttentionPlan, Backend, NativePlan

#: (rows of q, K/V tokens) of each sequence: a prompt after some history, and a decode step.
_CALLS: Final = (((3, 5), (2, 19)), ((1, 7), (1, 33)))
#: Tolerance for values of about 1, in bfloat16 and float16.
_TOLERANCE: Final = 0.03
_WORDS: Final = 300  # characters of a reason, which may be a compiler's output


def failure(like: AttentionPlan, make: Callable[[AttentionPlan], NativePlan]) -> str:
    """Returns why plans made by `make` fail on calls of the shape of `like`, or "".

    It tries a prompt and a decode step of that dtype, window and heads, on that device.
    """
    try:
        errors = [_error(_plan(like, call), make) for call in _CALLS]
    except Exception as error:  # any error of the package, its compiler or the driver
        return reason_of(error)
    worst = max(errors)
    return "" if worst <= _TOLERANCE else f"its results are off by {worst:.2g}"


def reason_of(error: Exception) -> str:
    """Returns an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]


def _plan(like: AttentionPlan, call: tuple[tuple[int, int], ...]) -> AttentionPlan:
    """Returns a plan of `call` over pages in a random order."""
    lengths = torch.tensor([kv_len for _, kv_len in call], dtype=torch.int32)
    most = -(-int(lengths.max()) // like.page_tokens)
    bounds = [0, *accumulate(rows for rows, _ in call)]
    return replace(
        like,
        backend=Backend.REFERENCE,
        q_indptr=torch.tensor(bounds, dtype=torch.int32),
        kv_lens=lengths,
        page_table=torch.arange(len(call) * most, dtype=torch.int32).flip(0).view(len(call), most),
        q_positions=None,
        kv_positions=None,
        sequences=tuple(
            (start, stop, kv_len)
            for start, stop, (_, kv_len) in zip(bounds[:-1], bounds[1:], call, strict=True)
        ),
        device_table=None,
    )


def _error(plan: AttentionPlan, make: Callable[[AttentionPlan], NativePlan]) -> float:
    """Returns the largest deviation from the reference."""
    numbers = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers).to(plan.device, plan.dtype)

    q_nhd = drawn(plan.num_tokens, plan.num_q_heads, plan.head_dim)
    pages = plan.page_table.numel()
    kv_layer = drawn(pages, 2, plan.num_kv_heads, plan.page_tokens, plan.head_dim)
    scale = plan.head_dim**-0.5
    out_nhd = torch.full_like(q_nhd, torch.nan)
    lse_nh = torch.full(q_nhd.shape[:2], torch.nan, device=plan.device)
    make(plan).run(q_nhd, kv_layer, scale=scale, out_nhd=out_nhd, lse_nh=lse_nh)
    wanted_nhd, wanted_lse_nh = reference.attention(plan, q_nhd, kv_layer, scale=scale)
    off = (out_nhd.double() - wanted_nhd).abs().max(), (lse_nh - wanted_lse_nh).abs().max()
    return max(torch.nan_to_num(error, nan=torch.inf).item() for error in off)
