"""One forward pass over sequences that decode and chunks of prompts together, as a ragged batch.

Medha section 4.3 and Sarathi-Serve before it: every iteration carries the running decodes, one row
each, and after them the rows of as many prefill chunks as were packed. The model sees one batch:
linear layers see all rows at once, attention sees sequences of one and of many rows.

Shape letters: b sequences that decode, m chunks, n rows of all, B = b + m, r rows whose logits are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import RemoteRows, RemoteShard, remote_rows
from millrace.engine.attention.kvp_owner import (
    Remote,
    RemoteAttention,
    RemoteLink,
    slots_with_spill,
)
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The next token of each of b sequences, on the host; read before the pass returns."""

    token_ids: Tensor  # int64 [b]
    positions: Tensor  # int64 [b]
    kv_lens: Tensor  # int32 [b], the new token included, as far as its K/V is in the pages
    shards: Mapping[int, Sequence[RemoteShard]] = field(default_factory=dict)
    """By row, where KVP workers hold the K/V past the pages'."""
    lost: dict[int, str] = field(default_factory=dict)
    """Filled by the pass: rows whose logits are wrong because a KVP worker was lost, and why."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTables:
    """The places of a pass's rows and their K/V. All tensors are on the host."""

    token_ids: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: where each row's K/V goes
    indptr: Tensor  # int32 [B + 1]: the first row of each sequence, and the end
    kv_lens: Tensor  # int32 [B], the pass's rows included
    page_table: Tensor  # int32 [B, max_pages]
    rows: Tensor  # int64 [r]
    wanted_indptr: Tensor  # int32 [B + 1]: as `indptr`, over the wanted rows alone
    remote: Sequence[RemoteRows] = ()  # what KVP workers compute in the pass

    @property
    def is_step(self) -> bool:
        """Returns whether the pass is a decode step: one row for each sequence, all rows wanted."""
        return len(self.token_ids) == len(self.kv_lens) == len(self.rows) and not self.remote


NO_DECODES = DecodeRows(
    token_ids=torch.empty(0, dtype=torch.int64),
    positions=torch.empty(0, dtype=torch.int64),
    kv_lens=torch.empty(0, dtype=torch.int32),
)


def prompt_tables(
    tasks: Sequence[PrefillTask], page_tokens: int, remote: Remote | None = None
) -> RaggedTables:
    """Makes the tables of a pass over chunks alone."""
    table = page_table_of([task.pages for task in tasks])
    return mixed_tables(NO_DECODES, table, tasks, page_tokens, remote)


def mixed_tables(
    decodes: DecodeRows,
    page_table: Tensor,
    tasks: Sequence[PrefillTask],
    page_tokens: int,
    remote: Remote | None = None,
) -> RaggedTables:
    """Makes the tables of a mixed pass, the decodes first. page_table: int32 [B, max_pages].

    No Python runs for every decode, except for spread requests. Raises ValueError when a request
    is spread and `remote` is None, or the spill pages of `remote` have too little room.
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
    chunk_kv_lens = torch.tensor([task.own_tokens for task in tasks], dtype=torch.int32)
    kv_lens = torch.cat((decodes.kv_lens, chunk_kv_lens))
    rows: list[RemoteRows] = []
    if decodes.shards or any(task.is_spread for task in tasks):
        if remote is None:
            raise ValueError(
                "a pass has rows of spread requests; the runner has no link to KVP workers"
            )
        rows = _remote_rows(decodes, tasks, remote.reach)
        slots = slots_with_spill(
            page_table, owners, positions, kv_lens, page_tokens, remote.spill_pages
        )
    else:
        slots = slots_of(page_table, owners, positions, page_tokens)
    return RaggedTables(
        token_ids=torch.cat([decodes.token_ids, *(task.token_ids.cpu() for task in tasks)]),
        positions=positions,
        slots=slots,
        indptr=_indptr(ends),
        kv_lens=kv_lens,
        page_table=page_table,
        rows=torch.from_numpy(ends[chosen] - 1),
        wanted_indptr=_indptr(np.cumsum(chosen)),
        remote=rows,
    )


def remote_attention(
    remote: Remote | None, tables: RaggedTables, shared: Callable[[RemoteLink], RemoteLink]
) -> RemoteAttention | None:
    """Begins the KVP workers' part of a pass; None without one. `shared`: as of `Passes`."""
    if remote is None or not tables.remote:
        return None
    return RemoteAttention(shared(remote.link), tables.remote, tables.slots)


def hand_out_lost(
    lost: Mapping[int, str], decodes: DecodeRows, tasks: Sequence[PrefillTask]
) -> None:
    """Tells a pass's decodes and chunks which rows are wrong, and why."""
    decodes.lost.update((row, why) for row, why in lost.items() if row < len(decodes))
    end = len(decodes)
    for task in tasks:
        begin, end = end, end + len(task.token_ids)
        task.lost = next((lost[row] for row in range(begin, end) if row in lost), "")


def _remote_rows(
    decodes: DecodeRows, tasks: Sequence[PrefillTask], reach: int | None
) -> list[RemoteRows]:
    rows: list[RemoteRows] = []
    for row in sorted(decodes.shards):
        position = int(decodes.positions[row])
        shards = decodes.shards[row]
        rows += remote_rows(shards, first_row=row, first_position=position, num_rows=1, reach=reach)
    first = len(decodes)
    for task in tasks:
        rows += remote_rows(
            task.shards,
            first_row=first,
            first_position=task.history_tokens,
            num_rows=len(task.token_ids),
            reach=reach,
        )
        first += len(task.token_ids)
    return rows


def _indptr(ends: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
