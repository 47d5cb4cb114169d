"""One forward pass over sequences that decode and chunks of prompts together, as a ragged batch.

Medha section 4.3 and Sarathi-Serve before it: every iteration carries the running decodes, one row
each, and behind them the rows of as many prefill chunks as were packed. To the model it is one
batch: linear layers see all rows at once, attention sees sequences of one and of many rows.

Shape letters: b sequences that decode, m chunks, n rows of all, B = b + m, r rows whose logits are
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.engine.prefill_task import PrefillTask
from millrace.engine.step_tables import page_table_of, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The next token of each of b sequences, on the host. It is read before the pass returns."""

    token_ids: Tensor  # int64 [b]
    positions: Tensor  # int64 [b]
    kv_lens: Tensor  # int32 [b], the new token included

    def __len__(self) -> int:
        return len(self.token_ids)


class MixedRunner(Protocol):
    """What mixed batches need of `ModelRunner`, or of a group of ranks."""

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """A decode step and chunks in one pass: `ModelRunner.mixed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTables:
    """Where a pass's rows and their K/V are. All on the host."""

    token_ids: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: where each row's K/V goes
    indptr: Tensor  # int32 [B + 1]: the first row of each sequence, and the end
    kv_lens: Tensor  # int32 [B], the pass's rows included
    page_table: Tensor  # int32 [B, max_pages]
    rows: Tensor  # int64 [r]
    wanted_indptr: Tensor  # int32 [B + 1]: as `indptr`, of the rows that are wanted alone


NO_DECODES = DecodeRows(
    token_ids=torch.empty(0, dtype=torch.int64),
    positions=torch.empty(0, dtype=torch.int64),
    kv_lens=torch.empty(0, dtype=torch.int32),
)


def prompt_tables(tasks: Sequence[PrefillTask], page_tokens: int) -> RaggedTables:
    """Of a pass over chunks alone."""
    table = page_table_of([task.pages for task in tasks])
    return mixed_tables(NO_DECODES, table, tasks, page_tokens)


def mixed_tables(
    decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask], page_tokens: int
) -> RaggedTables:
    """Decodes first, then the chunks. page_table: int32 [B, max_pages], in that order.

    What it does for the decodes takes no Python for each of them.
    """
    size = len(decodes)
    lengths = np.array([len(task.token_ids) for task in tasks], dtype=np.int64)
    all_lengths = np.concatenate((np.ones(size, dtype=np.int64), lengths))
    wanted = np.array([task.want_logits for task in tasks], dtype=np.bool_)
    ends = np.cumsum(all_lengths)
    chosen = np.concatenate((np.ones(size, dtype=np.bool_), wanted))
    positions = torch.cat(
        [decodes.positions] + [torch.arange(task.history_tokens, task.kv_tokens) for task in tasks]
    )
    owners = torch.from_numpy(np.repeat(np.arange(len(all_lengths)), all_lengths))
    chunk_kv_lens = torch.tensor([task.kv_tokens for task in tasks], dtype=torch.int32)
    return RaggedTables(
        token_ids=torch.cat([decodes.token_ids, *(task.token_ids.cpu() for task in tasks)]),
        positions=positions,
        slots=slots_of(page_table, owners, positions, page_tokens),
        indptr=_indptr(ends),
        kv_lens=torch.cat((decodes.kv_lens, chunk_kv_lens)),
        page_table=page_table,
        rows=torch.from_numpy(ends[chosen] - 1),
        wanted_indptr=_indptr(np.cumsum(chosen)),
    )


def _indptr(ends: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
