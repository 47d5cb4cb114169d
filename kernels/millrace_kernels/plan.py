"""What one attention call over paged K/V is going to do, worked out once per step.

A plan holds for every layer of a step: the layers share lengths and page tables, and differ only
in the data. Shape letters: n tokens of all sequences, h heads, d head_dim, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from millrace_kernels import _cpu


class Backend(StrEnum):
    """Who computes attention.

    AUTO gives each sequence to the fastest that the device can run; the others take them all.
    """

    AUTO = "auto"
    TORCH = "torch"
    CPU = "cpu"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """A checked attention call: ragged queries over paged K/V.

    Row i of a sequence with q_len rows stands at position kv_len - q_len + i and sees the K/V at
    positions up to its own (and with a window, only the last `sliding_window` of those).

    q_indptr: int32 [B + 1] on the CPU, kv_lens: int32 [B] on the CPU, page_table: int32
    [B, max_pages] on the CPU. `sequences` holds (first row, last row + 1, kv_len) of each;
    those with at most `native_rows` rows of q are the C++ kernel's, by `native`, the rest torch's.
    """

    backend: Backend
    native_rows: int
    native: _cpu.AttentionPlan | None
    q_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    sequences: tuple[tuple[int, int, int], ...]
    page_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None

    @property
    def num_tokens(self) -> int:
        """Rows of q and out."""
        return self.sequences[-1][1] if self.sequences else 0


def check_tables(
    q_indptr: Tensor, kv_lens: Tensor, page_table: Tensor, page_tokens: int
) -> tuple[tuple[int, int, int], ...]:
    """Check that the three tables agree; return (first row, last row + 1, kv_len) of each sequence.

    Raises ValueError naming the table and the sequence at fault.
    """
    tables = (("q_indptr", q_indptr, 1), ("kv_lens", kv_lens, 1), ("page_table", page_table, 2))
    for name, table, dims in tables:
        if table.dtype != torch.int32 or table.dim() != dims:
            raise ValueError(f"{name} must be int32 with {dims} dimensions, got {table.dtype}")
    batch = kv_lens.numel()
    if q_indptr.numel() != batch + 1 or page_table.shape[0] != batch:
        raise ValueError(
            f"q_indptr has {q_indptr.numel()} entries and page_table {page_table.shape[0]} rows "
            f"for {batch} sequences"
        )
    bounds = q_indptr.tolist()
    if bounds[0] != 0:
        raise ValueError(f"q_indptr must start at 0, got {bounds[0]}")
    capacity = page_table.shape[1] * page_tokens
    sequences = tuple(zip(bounds[:-1], bounds[1:], kv_lens.tolist(), strict=True))
    for index, (start, stop, kv_len) in enumerate(sequences):
        if stop < start:
            raise ValueError(f"q_indptr falls at sequence {index}: {start} to {stop}")
        if not 0 <= kv_len <= capacity:
            raise ValueError(f"kv_lens[{index}] = {kv_len} is outside 0 to {capacity}")
        if kv_len and stop - start > kv_len:
            raise ValueError(f"sequence {index} has {stop - start} queries for {kv_len} K/V")
    return sequences
