"""A group of ranks as the KV owner of a long request: only rank 0 has a link to the KVP workers.

Each rank has its heads of the queries and of the K/V. Rank 0 gathers the queries, reads new K/V in
the memory that all ranks share, and broadcasts the partial results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import RemoteRows
from millrace.engine.attention.kvp_owner import Partial, RemoteLink
from millrace.engine.model.communicator import Communicator
from millrace_kernels import api as kernels


class SharedRemote:
    """The `RemoteLink` of each rank of a tensor-parallel group."""

    def __init__(
        self, ranks: Communicator, link: RemoteLink | None = None, storage: Tensor | None = None
    ) -> None:
        """Rank 0's `link`, and its `storage` of all ranks: [pools, layers, pages, ...]."""
        self._ranks = ranks
        self._link = link
        self._storage = storage
        self._q = torch.empty(0)

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        if self._link is not None:
            self._link.begin(rows, slots)

    def send(self, layer: int, q_nhd: Tensor, kv_layers: Tensor) -> None:
        """`kv_layers`: the rank's own; rank 0 reads those of all."""
        self._q = q_nhd
        parts = self._ranks.gather(q_nhd.contiguous())  # all have written their K/V
        if self._link is not None and self._storage is not None:
            self._link.send(layer, torch.cat(parts, dim=1), self._storage[:, layer])

    def partials(self, layer: int) -> Iterator[Partial]:
        """One partial of all rows, empty for rows without a KVP worker."""
        rows, heads, width = self._q.shape
        shape = (rows, heads * self._ranks.size)
        out = torch.zeros(*shape, width, device=self._q.device)
        lse = torch.full(shape, -torch.inf, device=self._q.device)
        if self._link is not None:
            for of, part, part_lse in self._link.partials(layer):
                own, own_lse = out[of], lse[of]
                kernels.merge_attention_(own, own_lse, part, part_lse)
                out[of], lse[of] = own, own_lse
        self._ranks.broadcast(out)
        self._ranks.broadcast(lse)
        first = self._ranks.rank * heads
        mine = slice(first, first + heads)
        yield Partial(slice(0, rows), out[:, mine].contiguous(), lse[:, mine].contiguous())

    def end(self) -> Mapping[RemoteRows, str]:
        return {} if self._link is None else self._link.end()
