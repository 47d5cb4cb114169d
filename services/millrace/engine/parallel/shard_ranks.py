"""A KVP worker of several ranks with pools of their own: each rank attends for its heads.

Queries, new K/V and partial results lie in memory on the host that all ranks map. So a rank reads
its heads of what an owner has sent, and writes its heads of the answer, and rank 0 sends calls
alone.
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
from millrace.engine.attention.kvp_worker import HeadShare, ShardAttention
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.rank_calls import RankCalls, answer_calls


class RankedShards:
    """`ShardAttention` of a group of ranks, at rank 0."""

    def __init__(
        self,
        storage: Tensor,
        shape: ExchangeShape,
        nbytes: int,
        windows: Sequence[int | None],
        backend: str,
        others: RankCalls,
    ) -> None:
        """`storage`: rank 0's; `nbytes`: of the server's memory, which is `memory`; `others`: to
        `serve_shards`. Raises ValueError as `ShardAttention` does, CapacityError when the host has
        no room, and RankError when another rank fails.
        """
        handle = os.memfd_create("millrace-kvp")
        try:
            try:
                os.ftruncate(handle, nbytes)
            except OSError as error:
                raise CapacityError(f"no room for {nbytes} bytes of partial results") from error
            self.memory = _mapped(handle, nbytes)
            others.begin("open", shape, nbytes, tuple(windows), backend, others.ranks)
            others.hand_over(handle)
        finally:
            os.close(handle)
        share = share_of(shape, 0, others.ranks)
        self._own = ShardAttention(storage, shape, self.memory, windows, backend, share)
        others.collect()
        self._others = others

    def open(self, shard: int, pages: Sequence[int], start_token: int, end_token: int) -> None:
        """`ShardAttention.open`."""
        self._own.open(shard, pages, start_token, end_token)
        self._others.tell("open", shard, pages, start_token, end_token)

    def landed(self, shard: int, end_token: int) -> None:
        """`ShardAttention.landed`."""
        self._own.landed(shard, end_token)
        self._others.tell("landed", shard, end_token)

    def close(self, shard: int) -> None:
        """`ShardAttention.close`."""
        self._own.close(shard)
        self._others.call("close", shard)

    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int) -> None:
        """`ShardAttention.begin`."""
        self._own.begin(slot, piece, at, entries)  # raises its errors before others get the call
        self._others.call("begin", slot, piece, at, entries)

    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        """`ShardAttention.layer`, of all ranks at once."""
        self._own.check(slot, piece, layer)
        self._others.begin("layer", slot, piece, layer)
        missing = self._own.layer(slot, piece, layer)
        self._others.collect()
        return missing

    def forget(self, slot: int) -> None:
        """`ShardAttention.forget`."""
        self._own.forget(slot)
        self._others.tell("forget", slot)


def serve_shards(pipe: Connection, storage: Callable[[], Tensor], rank: int) -> None:
    """Attends for `RankedShards` over the rank's pool (`Beside`)."""

    def opened(
        shape: ExchangeShape, nbytes: int, windows: Sequence[int | None], backend: str, ranks: int
    ) -> ShardAttention:
        handle = recv_handle(pipe)
        try:
            memory = _mapped(handle, nbytes)
        finally:
            os.close(handle)
        share = share_of(shape, rank, ranks)
        return ShardAttention(storage(), shape, memory, windows, backend, share)

    answer_calls(pipe, opened)


def share_of(shape: ExchangeShape, rank: int, ranks: int) -> HeadShare:
    """Returns the heads of a rank, as its part of the model has them."""
    heads = shape.num_q_heads // ranks
    kv = TpShard(rank, ranks).kv_heads(shape.num_kv_heads)
    return HeadShare(slice(rank * heads, (rank + 1) * heads), slice(kv.start, kv.start + kv.count))


def _mapped(handle: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
