"""Chooses the next token of every row on a CUDA device; the host never waits.

The peak and the greedy choice are torch's `max`. A plain draw inverts the running sum by id in two
kernels. A filtered draw takes the 1024 likeliest by torch's `topk`, puts them in order by torch's
`sort` (both use radix passes that a Triton kernel would only repeat), and draws among them in one
kernel; rows that may need more tokens are drawn again from the whole vocabulary, by a kernel that
returns at once for every settled row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from millrace_kernels.triton_backend.jit import block, launch
from millrace_kernels.triton_backend.kernels import sampling as kernels

CANDIDATES: Final = 1024
_BLOCK: Final = 4096
_LAST_ID: Final = 0x7FFFFFFF


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row of logits float32 [b, vocab]: (ids int64 [b], peaks float32 [b]).

    temperatures (0: greedy), top_p, min_p, uniforms (in [0, 1)): float64 [b]; top_k int64 [b] (0:
    all). Settings on the host save the launches that no row needs; with settings on the device all
    run. Sums are float64 and ties go to the lowest id. A row whose peak is NaN or infinite has no
    meaningful id. Raises ValueError when logits are not float32 rows.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 rows, got {logits.dtype} {tuple(logits.shape)}")
    peaks, ids = logits.max(dim=-1)
    drawn = temperatures > 0
    filtered = drawn & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if not logits.shape[0] or _none(drawn):
        return ids, peaks
    device, (rows, vocab) = logits.device, logits.shape
    temperatures, top_k, top_p, min_p, uniforms = _copy_over(
        device, temperatures, top_k, top_p, min_p, uniforms
    )
    settings = (peaks, temperatures, top_k.long(), top_p, min_p, uniforms)
    blocks = -(-vocab // _BLOCK)
    masses = torch.empty((rows, blocks), dtype=torch.float64, device=device)
    launch(
        kernels.sum_weights,
        (rows, blocks),
        logits,
        *(peaks, temperatures, masses, vocab, logits.stride(0)),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    if not _none(drawn & ~filtered):
        launch(
            kernels.draw_plain,
            (rows,),
            logits,
            *(*settings, masses, ids, vocab, logits.stride(0), blocks),
            BLOCK=_BLOCK,
            BLOCKS=block(blocks),
            num_warps=8,
        )
    if not _none(filtered):
        _draw_filtered(logits, settings, masses, ids)
    return ids, peaks


def _draw_filtered(
    logits: Tensor, settings: tuple[Tensor, ...], masses: Tensor, ids: Tensor
) -> None:
    rows, vocab = logits.shape
    keys = _likeliest(logits, min(CANDIDATES, vocab))
    settled = torch.empty(rows, dtype=torch.int32, device=logits.device)
    launch(
        kernels.draw_among,
        (rows,),
        keys,
        *(*settings, masses, ids, settled, vocab, masses.shape[1]),
        COUNT=keys.shape[1],
        BLOCK_C=block(keys.shape[1]),
        BLOCKS=block(masses.shape[1]),
    )
    if keys.shape[1] < vocab:
        launch(
            kernels.draw_by_bisection,
            (rows,),
            logits,
            *(*settings, ids, settled, vocab, logits.stride(0)),
            BLOCK=min(_BLOCK, block(vocab)),
            num_warps=16,
        )


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Returns keys int64 [b, count] of the likeliest tokens, the likeliest first, as in the
    kernels: (logit, lowest id) in one number.
    """
    values, ids = torch.topk(logits, count, dim=-1, sorted=False)
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & _LAST_ID)
    keys: Tensor = (ordered.long() << 32) | (_LAST_ID - ids)
    return keys.sort(dim=-1, descending=True).values


def _copy_over(device: torch.device, *settings: Tensor) -> Sequence[Tensor]:
    """Returns settings [b] on the device, those of the host as float64 by one copy for which the
    host does not wait. float64 holds every `top_k` up to a vocabulary."""
    if settings[0].device.type != "cpu":
        return [setting.contiguous() for setting in settings]
    shape = (len(settings), *settings[0].shape)
    packed = torch.empty(shape, dtype=torch.float64, pin_memory=device.type == "cuda")
    torch.stack([setting.double() for setting in settings], out=packed)
    return packed.to(device, non_blocking=True).unbind()


def _none(rows: Tensor) -> bool:
    """Returns whether no row is true, as far as the host knows without waiting."""
    return rows.device.type == "cpu" and not bool(rows.any())
