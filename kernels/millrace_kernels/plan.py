"""The plan of one attention call over paged K/V, computed once per step.

A plan holds for every layer of a step: the layers share lengths, page tables and positions, and
differ only in the data. Shape letters: n tokens of all sequences, h heads, d head_dim, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor


class Backend(StrEnum):
    """The backends that compute attention.

    AUTO is the fastest backend of the device.
    """

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class NativePlan(Protocol):
    """A backend's own form of a plan: its task list, or its tables on the device."""

    def run(
        self, q_nhd: Tensor, kv_layer: Tensor, *, scale: float, out_nhd: Tensor, lse_nh: Tensor
    ) -> None:
        """Fills the rows of out_nhd and lse_nh that the plan gives to this backend."""


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """A checked attention call: ragged queries over paged K/V.

    Row i of a sequence with q_len rows stands at position `q_positions` says, or else at kv_len -
    q_len + i; its j-th K/V slot holds position `kv_positions` says, or else j. A row sees positions
    at or before its own (all, when not `causal`), and with a window only positions above its own -
    `sliding_window`.

    q_indptr: int32 [B + 1] on the CPU, kv_lens: int32 [B] on the CPU, page_table: int32 [B,
    max_pages]. q_positions: int32 [n], kv_positions: int32 [sum(kv_lens)], both on the CPU.
    `sequences` holds (first row, last row + 1, kv_len) of each. `native` is None where torch
    computes. `is_auto`: the backend was not asked for by name. `dispatch` fills in these and the
    backend; nothing else changes a plan (not frozen: making a plan is part of every decode step).
    `device_table` has the entries of `page_table` that are read, on the device, or is None.
    """

    backend: Backend
    native: NativePlan | None
    q_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    q_positions: Tensor | None
    kv_positions: Tensor | None
    sequences: tuple[tuple[int, int, int], ...]
    page_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    device_table: Tensor | None = None
    is_auto: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of rows of q and out."""
        return self.sequences[-1][1] if self.sequences else 0

    @property
    def has_positions(self) -> bool:
        """True if rows or K/V slots have positions other than their order gives."""
        return self.q_positions is not None or self.kv_positions is not None

    def positions(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the positions of one sequence's rows and of its K/V slots, int64 on the CPU."""
        start, stop, kv_len = self.sequences[index]
        if self.q_positions is None:
            rows = torch.arange(kv_len - (stop - start), kv_len)
        else:
            rows = self.q_positions[start:stop].long()
        if self.kv_positions is None:
            return rows, torch.arange(kv_len)
        before = sum(kv for _, _, kv in self.sequences[:index])
        return rows, self.kv_positions[before : before + kv_len].long()


def check_tables(
    q_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    page_tokens: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
) -> tuple[tuple[int, int, int], ...]:
    """Checks that the tables agree; returns (first row, last row + 1, kv_len) of each sequence.

    Raises ValueError naming the table and the sequence at fault.
    """
    _need_int32("q_indptr", q_indptr, 1)
    _need_int32("kv_lens", kv_lens, 1)
    _need_int32("page_table", page_table, 2)
    batch = kv_lens.numel()
    if q_indptr.numel() != batch + 1 or page_table.shape[0] != batch:
        raise ValueError(
            f"q_indptr has {q_indptr.numel()} entries and page_table {page_table.shape[0]} rows "
            f"for {batch} sequences"
        )
    bounds, lengths = q_indptr.tolist(), kv_lens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"q_indptr must start at 0, got {bounds[0]}")
    _check_positions("q_positions", q_positions, bounds[-1])
    _check_positions("kv_positions", kv_positions, sum(lengths))
    capacity = page_table.shape[1] * page_tokens
    sequences = tuple(zip(bounds[:-1], bounds[1:], lengths, strict=True))
    for index, (start, stop, kv_len) in enumerate(sequences):
        if stop < start:
            raise ValueError(f"q_indptr falls at sequence {index}: {start} to {stop}")
        if not 0 <= kv_len <= capacity:
            raise ValueError(f"kv_lens[{index}] = {kv_len} is outside 0 to {capacity}")
        if q_positions is None and kv_len and stop - start > kv_len:
            raise ValueError(f"sequence {index} has {stop - start} queries for {kv_len} K/V")
    return sequences


def _check_positions(name: str, positions: Tensor | None, wanted: int) -> None:
    if positions is not None:
        _need_int32(name, positions, 1)
        if positions.numel() != wanted:
            raise ValueError(f"{name} has {positions.numel()} entries for {wanted} rows")


def _need_int32(name: str, table: Tensor, dims: int) -> None:
    if table.dtype != torch.int32 or table.dim() != dims:
        raise ValueError(f"{name} must be int32 with {dims} dimensions, got {table.dtype}")
