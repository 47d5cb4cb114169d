"""The KV pools of a group's ranks: where they lie, how large they are, what reaches them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch
from torch import Tensor

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.host_swap import SwapBuffer
from millrace.engine.model.loader import Model
from millrace.engine.parallel.commands import Instruction, Room
from millrace.engine.parallel.follower import Beside
from millrace.engine.parallel.group_passes import GroupPasses
from millrace.engine.parallel.kv_memory import new_memory
from millrace.engine.parallel.rank_calls import RankCalls, answer_calls
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.parallel.shard_ranks import serve_shards

_TRANSPORT: Final = "transport"
_SWAP: Final = "swap"
_SHARDS: Final = "shards"


@dataclass(frozen=True, slots=True)
class RankPools:
    """The pools of ranks 1 and on, of a group that `services` began."""

    transports: tuple[Connection, ...]
    """Pipes to what moves the KV of each rank; empty where nothing does."""
    swap: RankCalls
    """To each rank's `SwapBuffer`."""
    shards: RankCalls
    """To each rank's part of `RankedShards`."""

    @staticmethod
    def of(group: RankGroup) -> RankPools:
        pipes, pids = group.besides, group.pids
        return RankPools(
            tuple(pipes.get(_TRANSPORT, ())),
            RankCalls(pipes[_SWAP], pids),
            RankCalls(pipes[_SHARDS], pids),
        )


def services(transport: Beside | None) -> Mapping[str, Beside]:
    """Returns what a rank with a pool of its own serves. `transport`: what moves its KV."""
    found: dict[str, Beside] = {_SWAP: serve_swap, _SHARDS: serve_shards}
    return found if transport is None else {**found, _TRANSPORT: transport}


def serve_swap(pipe: Connection, storage: Callable[[], Tensor], rank: int) -> None:
    """Swaps pages of the rank's pool for `KvSwap` (`Beside`)."""
    answer_calls(pipe, lambda num_pages: SwapBuffer(storage(), num_pages))


def has_own_pools(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether each rank of an instance has a KV pool of its own.

    Raises ConfigError where ranks can't share one.
    """
    if config.kv_pools == "shared" and device.type != "cpu" and config.tensor_parallel > 1:
        raise ConfigError(
            f"engine.kv_pools is 'shared' on {device}; ranks share memory on the host alone"
        )
    if config.kv_pools == "own" and config.stages > 1:
        raise ConfigError(
            f"engine.kv_pools is 'own' and engine.stages {config.stages}; stages share the memory "
            "of their KV"
        )
    is_own = config.kv_pools == "own" or (config.kv_pools == "auto" and device.type != "cpu")
    return is_own and config.tensor_parallel > 1


def agreed_bytes(group: RankGroup, config: EngineConfig, least_bytes: int, *, pools: int) -> int:
    """Returns the bytes of each of so many `pools`: what the rank with the least memory has.

    `least_bytes`: for all pools together, on the host. Raises ConfigError as `rank_bytes` does, and
    RankError when another rank fails.
    """
    room = Room(config=config, least_bytes=least_bytes, pools=pools, sharers=group.sharers)
    group.send(Instruction(room))
    own = room.bytes_on(group.device)
    return min(own, *group.collect())


def group_passes(
    group: RankGroup, model: Model, layout: KvLayout, config: EngineConfig
) -> GroupPasses:
    """Makes the passes of a group, with pools of their own or in one memory that all ranks map."""
    backend = config.attention_backend
    if has_own_pools(config, group.device):
        return GroupPasses(group, model, layout, backend)
    handle = new_memory(layout)
    try:
        return GroupPasses(group, model, layout, backend, handle=handle)
    finally:
        os.close(handle)
