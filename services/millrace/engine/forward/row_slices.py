"""Cuts a pass's attention into slices of rows, so that a pass may stop within it.

FlowPrefill stops a pass between operators (section 5.1). All of them take as long as the chunk has
rows, but attention grows with the history too: on one H100, 2,048 rows over a million K/V slots
take some 70 ms, 30 times as long as the next operator. So attention of a long history is computed
in several launches of about equal work, and the pass may stop between two of them. A row's result
does not depend on where another process stops, because the cuts depend on the tables alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SLICE_FLOPS: Final = 1e12
"""The work of a slice: 2 ms of an H100. 8,192 rows of Llama-3-8B's largest linear take 2.6 ms."""

MOST_SLICES: Final = 16
"""The most slices of one attention. Each has a plan of its own, and memory for it."""

_ROWS: Final = 64
"""Slices begin at a multiple of so many rows, so that tiles of a kernel are whole."""


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows `start` to `stop` - 1 of a pass: a ragged batch of its own.

    indptr: int32 [B + 1], the first of these rows of each sequence; kv_lens: int32 [B], the K/V
    slots up to the sequence's last of these rows.
    """

    start: int
    stop: int
    indptr: Tensor
    kv_lens: Tensor


def cut_rows(
    indptr: Tensor,
    kv_lens: Tensor,
    *,
    flops_per_slot: float,
    window: int | None,
    slice_flops: float = SLICE_FLOPS,
) -> list[RowSlice]:
    """Cuts the rows of causal attention into slices of about `slice_flops`; [] if one is enough.

    indptr: int32 [B + 1]; kv_lens: int32 [B], where the rows of a sequence are its last ones.
    flops_per_slot: of one row over one K/V slot; window: the most slots that a row sees.
    """
    starts, lengths = indptr.numpy().astype(np.int64), kv_lens.numpy().astype(np.int64)
    seen = _seen(starts, lengths)
    done = np.cumsum(seen if window is None else np.minimum(seen, window))
    total = float(done[-1]) if len(done) else 0.0
    count = min(int(flops_per_slot * total / slice_flops) + 1, MOST_SLICES)
    if count == 1:
        return []
    cuts = np.searchsorted(done, total * np.arange(1, count) / count)
    bounds = np.unique(np.concatenate(([0], -(-cuts // _ROWS) * _ROWS, [len(done)])))
    bounds = bounds[bounds <= len(done)]
    if len(bounds) == 2:
        return []
    return [
        _slice(starts, lengths, first, last)
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


def _seen(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the K/V slots that each row sees, int64 [n]."""
    rows = np.diff(starts)
    return np.arange(starts[-1]) + 1 + np.repeat(lengths - rows - starts[:-1], rows)


def _slice(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], first: int, last: int
) -> RowSlice:
    inside = np.clip(starts, first, last)
    after = starts[1:] - inside[1:]  # rows of each sequence behind the slice
    own = np.where(np.diff(inside) > 0, lengths - after, 0)
    return RowSlice(
        first,
        last,
        torch.from_numpy((inside - first).astype(np.int32)),
        torch.from_numpy(own.astype(np.int32)),
    )
