"""A group of ranks as the KV owner of a long request: only rank 0 has a link to the KVP workers.

Each rank has its heads of the queries and of the K/V. Rank 0 gathers both and broadcasts the
partial results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.core.kv.kvp_pass import RemoteRows
from millrace.engine.attention.kvp_memory import NewRows
from millrace.engine.attention.kvp_owner import Partial, RemoteLink
from millrace.engine.model.communicator import Communicator
from millrace_kernels import api as kernels


class NewKv(Protocol):
    """How rank 0's link gets the K/V of new rows of all ranks. Each rank has one."""

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> Tensor:
        """Returns the slots for `RemoteLink.begin`, given those in a rank's pool."""

    def layer(self, layer: int, kv_layers: Tensor) -> Tensor:
        """Returns the memory for `RemoteLink.send` at rank 0. `kv_layers`: the rank's own."""


class MappedKv:
    """Rank 0 maps the pools of all ranks."""

    def __init__(self, storage: Tensor | None = None) -> None:
        """Rank 0's `storage` of all ranks: [pools, layers, pages, ...]."""
        self._storage = storage

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> Tensor:
        return slots

    def layer(self, layer: int, kv_layers: Tensor) -> Tensor:
        return kv_layers if self._storage is None else self._storage[:, layer]


class GatheredKv:
    """Each rank has a pool of its own, and sends its new rows to rank 0; one process, without
    `ranks`, passes its new rows on."""

    def __init__(self, ranks: Communicator | None = None, copies: int = 1) -> None:
        """`copies`: of each KV head, at neighbouring ranks."""
        self._ranks = ranks
        self._copies = copies
        self._slots = torch.empty(0, dtype=torch.int64)  # in the pool, of the new rows

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> Tensor:
        new = [row for e in rows for row in range(e.first_row, e.first_row + e.new_rows)]
        self._slots = slots[new]
        gathered = torch.zeros_like(slots)
        gathered[new] = torch.arange(len(new))
        return gathered

    def layer(self, layer: int, kv_layers: Tensor) -> Tensor:
        if not len(self._slots):
            return kv_layers[:, :0]
        planes, heads, page_tokens, width = kv_layers.shape[2:]
        kv = kv_layers.new_empty(len(self._slots), planes, heads, width)
        NewRows(self._slots // page_tokens, self._slots % page_tokens).read(kv_layers, kv)
        parts = [kv] if self._ranks is None else self._ranks.gather(kv)[:: self._copies]
        return torch.stack([_paged(part, page_tokens) for part in parts]) if parts else kv_layers


class NewRowsRemote:
    """The `RemoteLink` of a process whose layers lie in a pool of its own: the link that it wraps
    gets the K/V of new rows alone."""

    def __init__(self, link: RemoteLink) -> None:
        self._link = link
        self._new_kv = GatheredKv()

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        self._link.begin(rows, self._new_kv.begin(rows, slots))

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        self._link.send(layer, q_nhd, self._new_kv.layer(layer, kv_layers))

    def partials(self, layer: int) -> Iterator[Partial]:
        return self._link.partials(layer)

    def end(self) -> Mapping[RemoteRows, str]:
        return self._link.end()


class SharedRemote:
    """The `RemoteLink` of each rank of a tensor-parallel group."""

    def __init__(self, ranks: Communicator, new_kv: NewKv, link: RemoteLink | None = None) -> None:
        """`link`: rank 0's."""
        self._ranks = ranks
        self._new_kv = new_kv
        self._link = link
        self._q = torch.empty(0)

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        slots = self._new_kv.begin(rows, slots)
        if self._link is not None:
            self._link.begin(rows, slots)

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        """`kv_layers`: the rank's own."""
        self._q = q_nhd
        parts = self._ranks.gather(q_nhd.contiguous())  # all have written their K/V
        pages = self._new_kv.layer(layer, kv_layers)
        if self._link is not None:
            self._link.send(layer, torch.cat(parts, dim=1), pages)

    def partials(self, layer: int) -> Iterator[Partial]:
        """One partial of all rows, empty for rows without a KVP worker."""
        rows, heads, width = self._q.shape
        shape = (rows, heads * self._ranks.size)
        out = torch.zeros(*shape, width, device=self._q.device)
        lse = torch.full(shape, -torch.inf, device=self._q.device)
        if self._link is not None:
            for of, part, part_lse in self._link.partials(layer):
                own, own_lse = out[of], lse[of]
                part, part_lse = part.to(out.device), part_lse.to(lse.device)
                kernels.merge_attention_(own, own_lse, part, part_lse)
                out[of], lse[of] = own, own_lse
        self._ranks.broadcast(out)
        self._ranks.broadcast(lse)
        first = self._ranks.rank * heads
        mine = slice(first, first + heads)
        yield Partial(slice(0, rows), out[:, mine].contiguous(), lse[:, mine].contiguous())

    def end(self) -> Mapping[RemoteRows, str]:
        return {} if self._link is None else self._link.end()


def _paged(kv: Tensor, page_tokens: int) -> Tensor:
    """Returns rows [m, 2, k, d] as pages [pages, 2, k, page_tokens, d], the last one filled up."""
    rows, *rest = kv.shape
    pages = ceil_div(rows, page_tokens)
    filled = kv.new_zeros(pages * page_tokens, *rest)
    filled[:rows] = kv
    return filled.view(pages, page_tokens, *rest).permute(0, 2, 3, 1, 4)
