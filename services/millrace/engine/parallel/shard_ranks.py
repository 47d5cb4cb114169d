"""A KVP worker of several members with pools of their own: each attends for its heads and layers.

Queries, new K/V and partial results lie in memory on the host that all members map. So a member
reads its heads of what an owner has sent, and writes its heads of the answer, and the leader sends
calls alone. A layer's call goes to the ranks of the stage that has the layer, other calls to all.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
from torch import Tensor

from millrace.core.errors import CapacityError
from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.core.kv.layout import stage_layers
from millrace.engine.attention.kvp_worker import HeadShare, ShardAttention
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.member_calls import MemberCalls, answer_calls


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
                members.begin("open", *about)
                members.hand_over(handle)
        finally:
            os.close(handle)
        share = share_of(shape, 0, ranks)
        self._own = ShardAttention(storage, shape, self.memory, windows, backend, share)
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
        for members in self._others:
            members.begin("begin", slot, piece, at, entries)
        for members in self._others:
            members.collect()

    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        """`ShardAttention.layer`, of all ranks of the layer's stage at once."""
        self._own.check(slot, piece, layer)
        stage = self._stage_of[layer]
        members = self._others[stage]
        members.begin("layer", slot, piece, layer)
        if stage:
            missing: Sequence[int] = members.collect()[0]  # the same at every rank
            return missing
        missing = self._own.layer(slot, piece, layer)
        members.collect()
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
    ) -> ShardAttention:
        handle = recv_handle(pipe)
        try:
            memory = _mapped(handle, nbytes)
        finally:
            os.close(handle)
        share = share_of(shape, rank, ranks)
        return ShardAttention(storage(), shape, memory, windows, backend, share, first_layer)

    answer_calls(pipe, opened)


def share_of(shape: ExchangeShape, rank: int, ranks: int) -> HeadShare:
    """Returns the heads of a rank, as its part of the model has them."""
    heads = shape.num_q_heads // ranks
    kv = TpShard(rank, ranks).kv_heads(shape.num_kv_heads)
    return HeadShare(slice(rank * heads, (rank + 1) * heads), slice(kv.start, kv.start + kv.count))


def _mapped(handle: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
