"""Attention over K/V that lies partly at other instances (KVP: Mnemosyne 4.4, Medha 3.3).

A long request's KV owner holds the K/V of its first tokens, KVP workers the K/V of the others. In
every layer the owner sends the queries and the workers' new K/V to the workers, attends over its
own K/V meanwhile, and merges the workers' partial results by their log-sum-exps. A `RemoteLink`
moves all of these.

Shape letters: n rows of the pass, r rows of a partial, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import RemoteRows, RemoteShard
from millrace.engine.kv.step_tables import slots_of
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan

__all__ = [
    "Partial",
    "Remote",
    "RemoteAttention",
    "RemoteLink",
    "RemoteRows",
    "RemoteShard",
    "reach_of",
    "slots_with_spill",
]


class Partial(NamedTuple):
    """Partial results of some rows of a pass, on the host, valid until the next partial is asked
    for.
    """

    rows: Tensor | slice  # the rows: int64 [r], ascending, or neighbours
    out: Tensor  # float32 [r, h, d]
    lse: Tensor  # float32 [r, h], natural logarithm


class RemoteLink(Protocol):
    """Reaches the KVP workers, for one pass at a time. The compute thread uses it.

    Call `begin` once per pass; for each layer `send`, then `partials` to its end; then `end`. A
    pass may be given up at any point: the next `begin` makes sure that none of it is in flight.
    """

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        """slots: int64 [n], on the host, page * page_tokens + offset of each row's K/V."""
        ...

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        """Sends the q of the pass's remote rows, and the K/V of new ones, which lies at their slots
        in kv_layers [pools, pages, 2, k, page_tokens, d], whose heads are the pools' in order.
        Neither may change before the last partial."""
        ...

    def partials(self, layer: int) -> Iterator[Partial]:
        """Yields the partial results of a layer as they arrive; a row may be in several. Results of
        a lost KVP worker are missing."""
        ...

    def end(self) -> Mapping[RemoteRows, str]:
        """Returns those of the rows given to `begin` whose shard was lost, and why: they are wrong
        from some layer on."""
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """The resources of a KV owner for passes with remote rows.

    spill_pages: pages of the owner's pool where the K/V of workers' tokens lies until it is sent,
    with at least as many slots as a pass has tokens past the owner's own shards. The caller
    allocates and frees them; they may change between passes. `reach`: `reach_of` the model.
    """

    link: RemoteLink
    spill_pages: Sequence[int]
    reach: int | None = None


def reach_of(windows: Sequence[int | None]) -> int | None:
    """How far back any layer sees, by the layers' sliding windows; None: to the beginning."""
    widest = 0
    for window in windows:
        if window is None:
            return None
        widest = max(widest, window)
    return widest


class RemoteAttention:
    """The attention of one pass with remote rows, layer after layer."""

    def __init__(self, link: RemoteLink, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        """slots: int64 [n], on the host."""
        self._link = link
        self._wide: Tensor | None = None  # float32 [n, h, d], of the layer before
        link.begin(rows, slots)

    def run(
        self,
        layer: int,
        plan: AttentionPlan,
        q_nhd: Tensor,
        kv_layer: Tensor,
        scale: float,
        out: Tensor | None,
        lse: Tensor,
    ) -> Tensor:
        """Computes attention of q [n, h, d], whose K/V is in its pages: the owner's K/V by `plan`,
        merged with the workers' partials. lse: float32 [n, h], written. Returns out [n, h, d] of
        q's dtype."""
        out = torch.empty_like(q_nhd) if out is None else out
        self._link.send(layer, q_nhd, kv_layer[None])
        total = self._room(out)
        kernels.run_attention(plan, q_nhd, kv_layer, scale=scale, out=total, lse_out=lse)
        for rows, host_part, host_lse in self._link.partials(layer):
            part, part_lse = host_part.to(total.device), host_lse.to(total.device)
            if isinstance(rows, slice):
                kernels.merge_attention_(total[rows], lse[rows], part, part_lse)
            else:
                own, own_lse = total[rows], lse[rows]
                kernels.merge_attention_(own, own_lse, part, part_lse)
                total[rows], lse[rows] = own, own_lse
        return out if total is out else out.copy_(total)

    def _room(self, out: Tensor) -> Tensor:
        """Returns float32 memory where the partials are summed; the same in every layer."""
        if out.dtype is torch.float32:
            return out
        if self._wide is None:
            self._wide = torch.empty_like(out, dtype=torch.float32)
        return self._wide

    def end(self) -> dict[int, str]:
        """Returns each row of the pass that a lost shard has made wrong, and why."""
        lost: dict[int, str] = {}
        for entry, why in self._link.end().items():
            lost |= dict.fromkeys(range(entry.first_row, entry.first_row + entry.num_rows), why)
        return lost


def slots_with_spill(
    page_table: Tensor,
    owners: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    page_tokens: int,
    spill_pages: Sequence[int],
) -> Tensor:
    """Computes `step_tables.slots_of`, with a spill slot for every position past a sequence's
    `kv_lens`.

    Raises ValueError when there are too few spill pages.
    """
    position = positions.numpy()
    spilt = position >= kv_lens.numpy()[owners.numpy()]
    near = torch.from_numpy(np.where(spilt, 0, position))
    slots = slots_of(page_table, owners, near, page_tokens)
    needed = int(spilt.sum())
    if needed > len(spill_pages) * page_tokens:
        raise ValueError(
            f"{needed} tokens of a pass belong to KVP workers; {len(spill_pages)} spill pages have "
            f"room for {len(spill_pages) * page_tokens}"
        )
    number = np.arange(needed)
    pages = np.asarray(spill_pages, dtype=np.int64)
    slots.numpy()[spilt] = pages[number // page_tokens] * page_tokens + number % page_tokens
    return slots
