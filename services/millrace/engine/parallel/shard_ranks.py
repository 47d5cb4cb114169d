"""A KVP worker of several members with pools of their own: each attends for its heads and layers.

Queries, new K/V and partial results lie in memory on the host that all members map. So a member
reads its heads of what an owner has sent, and writes its heads of the answer, and the leader sends
calls alone. A layer's call goes to the ranks of the stage that has the layer, other calls to all.

Members on another host have memory of their own: with the calls come the table of a piece and the
rows of a layer, and the answer has the partial results of the member's heads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.core.errors import CapacityError
from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.core.kv.layout import stage_layers
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_worker import HeadShare, ShardAttention
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.member_calls import MemberCalls, answer_calls

Bytes = npt.NDArray[np.uint8]
Partials = tuple[Sequence[int], npt.NDArray[np.float32], npt.NDArray[np.float32]]


class MemberShards:
    """`ShardAttention` of an instance of several members, at the leader."""

    def __init__(
        self,
        storage: Tensor,
        shape: ExchangeShape,
        nbytes: int,
        windows: Sequence[int | None],
        backend: str,
        others: Sequence[MemberCalls],
    ) -> None:
        """`storage`: the leader's; `nbytes`: of the server's memory, which is `memory`; `others`:
        to `serve_shards` of each stage. Raises ValueError as `ShardAttention` does, CapacityError
        when the host has no room, and RankError when another member fails.
        """
        handle = os.memfd_create("millrace-kvp")
        ranks = 1 + len(others[0])
        held = [stage_layers(len(windows), stage, len(others)) for stage in range(len(others))]
        try:
            try:
                os.ftruncate(handle, nbytes)
            except OSError as error:
                raise CapacityError(f"no room for {nbytes} bytes of partial results") from error
            self.memory = _mapped(handle, nbytes)
            for members, layers in zip(others, held, strict=True):
                about = shape, nbytes, tuple(windows), backend, ranks, layers.start
                members.begin("open", *about, members.is_here)
                if members.is_here:
                    members.hand_over(handle)
        finally:
            os.close(handle)
        self._shares = [share_of(shape, rank, ranks) for rank in range(ranks)]
        self._entry_bytes = shape.entry_bytes
        self._own = ShardAttention(storage, shape, self.memory, windows, backend, self._shares[0])
        for members in others:
            members.collect()
        self._others = tuple(others)
        self._stage_of = [stage for stage, layers in enumerate(held) for _ in layers]

    def open(self, shard: int, pages: Sequence[int], start_token: int, end_token: int) -> None:
        """`ShardAttention.open`."""
        self._own.open(shard, pages, start_token, end_token)
        for members in self._others:
            members.tell("open", shard, pages, start_token, end_token)

    def landed(self, shard: int, end_token: int) -> None:
        """`ShardAttention.landed`."""
        self._own.landed(shard, end_token)
        for members in self._others:
            members.tell("landed", shard, end_token)

    def close(self, shard: int) -> None:
        """`ShardAttention.close`."""
        self._own.close(shard)
        for members in self._others:
            members.begin("close", shard)
        for members in self._others:
            members.collect()

    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int) -> None:
        """`ShardAttention.begin`."""
        self._own.begin(slot, piece, at, entries)  # raises its errors before others get the call
        table = self.memory[at[0] : at[0] + entries * self._entry_bytes].numpy()
        for members in self._others:
            read = () if members.is_here else (table,)
            members.begin("begin", slot, piece, at, entries, *read)
        for members in self._others:
            members.collect()

    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        """`ShardAttention.layer`, of all ranks of the layer's stage at once."""
        self._own.check(slot, piece, layer)
        stage = self._stage_of[layer]
        members = self._others[stage]
        if not members.is_here:
            return self._layer_elsewhere(members, slot, piece, layer)
        members.begin("layer", slot, piece, layer)
        if stage:
            missing: Sequence[int] = members.collect()[0]  # the same at every rank
            return missing
        missing = self._own.layer(slot, piece, layer)
        members.collect()
        return missing

    def _layer_elsewhere(
        self, members: MemberCalls, slot: int, piece: int, layer: int
    ) -> Sequence[int]:
        views = self._own.views(slot, piece)
        members.begin("layer", slot, piece, layer, bytes_of(views.q), bytes_of(views.kv))
        missing: Sequence[int] = ()
        for share, answer in zip(self._shares, members.collect(), strict=True):
            missing, out, lse = answer  # missing: the same at every rank
            views.out[:, share.q].copy_(torch.from_numpy(out))
            views.lse[:, share.q].copy_(torch.from_numpy(lse))
        return missing

    def forget(self, slot: int) -> None:
        """`ShardAttention.forget`."""
        self._own.forget(slot)
        for members in self._others:
            members.tell("forget", slot)


def serve_shards(pipe: Connection, storage: Callable[[], Tensor], rank: int) -> None:
    """Attends for `MemberShards` over the member's pool (`Beside`)."""

    def opened(
        shape: ExchangeShape,
        nbytes: int,
        windows: Sequence[int | None],
        backend: str,
        ranks: int,
        first_layer: int,
        is_here: bool,
    ) -> ShardAttention | _Elsewhere:
        if not is_here:
            memory, share = exchange_memory(nbytes), share_of(shape, rank, ranks)
            own = ShardAttention(storage(), shape, memory, windows, backend, share, first_layer)
            return _Elsewhere(own, memory, share)
        handle = recv_handle(pipe)
        try:
            memory = _mapped(handle, nbytes)
        finally:
            os.close(handle)
        share = share_of(shape, rank, ranks)
        return ShardAttention(storage(), shape, memory, windows, backend, share, first_layer)

    answer_calls(pipe, opened)


class _Elsewhere:
    """A member's `ShardAttention` with memory of its own, which the calls fill and read."""

    def __init__(self, attention: ShardAttention, memory: Tensor, share: HeadShare) -> None:
        self._attention = attention
        self._memory = memory
        self._heads = share.q
        self.open, self.landed = attention.open, attention.landed
        self.close, self.forget = attention.close, attention.forget

    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int, table: Bytes) -> None:
        self._memory[at[0] : at[0] + len(table)].copy_(torch.from_numpy(table))
        self._attention.begin(slot, piece, at, entries)

    def layer(self, slot: int, piece: int, layer: int, q: Bytes, kv: Bytes) -> Partials:
        """Returns the entries whose shard is gone, and the out and lse of the member's heads."""
        views = self._attention.views(slot, piece)
        for into, data in ((views.q, q), (views.kv, kv)):
            into.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
        missing = tuple(self._attention.layer(slot, piece, layer))
        out, lse = (part[:, self._heads].clone() for part in (views.out, views.lse))
        return missing, out.numpy(), lse.numpy()


def bytes_of(rows: Tensor) -> Bytes:
    """Returns contiguous rows as uint8, without a copy."""
    found: Bytes = rows.view(-1).view(torch.uint8).numpy()
    return found


def share_of(shape: ExchangeShape, rank: int, ranks: int) -> HeadShare:
    """Returns the heads of a rank, as its part of the model has them."""
    heads = shape.num_q_heads // ranks
    kv = TpShard(rank, ranks).kv_heads(shape.num_kv_heads)
    return HeadShare(slice(rank * heads, (rank + 1) * heads), slice(kv.start, kv.start + kv.count))


def _mapped(handle: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
