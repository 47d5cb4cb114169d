"""The KV pools of an instance's members: where they lie, how large they are, what reaches them.

A member is a process that computes: a rank of a stage. The leader is rank 0 of the first stage, and
the instance's own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from millrace.engine.parallel.member_calls import MemberCalls, answer_calls
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.parallel.shard_ranks import serve_shards

_TRANSPORT: Final = "transport"
_SWAP: Final = "swap"
_SHARDS: Final = "shards"

Pipes = Mapping[str, Sequence[Connection]]
"""Pipes to what the ranks of a stage serve beside their passes, by name; of the leader's stage
without the leader."""


@dataclass(frozen=True, slots=True)
class MemberPools:
    """The pools of an instance's other members, each in the member's process."""

    transports: Mapping[str, Connection]
    """Pipes to what moves the KV of each member, by the members' names and in the order of
    `KvLayout.member_pools`; empty where nothing does."""
    swap: MemberCalls
    """To each member's `SwapBuffer`."""
    shards: tuple[MemberCalls, ...]
    """To each member's part of `MemberShards`, by stage."""

    @staticmethod
    def of(
        layout: KvLayout, stages: Sequence[Pipes], *, later_elsewhere: bool = False
    ) -> MemberPools:
        """`stages`: the pipes of each stage, which begin with the leader's. `later_elsewhere`:
        later stages are on other hosts."""

        def members(service: str, stage: int | None = None) -> dict[str, Connection]:
            return {
                pool.name: stages[pool.stage][service][pool.rank - (not pool.stage)]
                for pool in layout.member_pools[1:]
                if stage in (None, pool.stage)
            }

        is_moved = any(_TRANSPORT in pipes for pipes in stages)
        return MemberPools(
            members(_TRANSPORT) if is_moved else {},
            MemberCalls(members(_SWAP)),
            tuple(
                MemberCalls(members(_SHARDS, stage), is_here=not (stage and later_elsewhere))
                for stage in range(len(stages))
            ),
        )


def services(transport: Beside | None) -> Mapping[str, Beside]:
    """Returns what a member with a pool of its own serves. `transport`: what moves its KV."""
    found: dict[str, Beside] = {_SWAP: serve_swap, _SHARDS: serve_shards}
    return found if transport is None else {**found, _TRANSPORT: transport}


def serve_swap(pipe: Connection, storage: Callable[[], Tensor], rank: int) -> None:
    """Swaps pages of the member's pool for `KvSwap` (`Beside`)."""
    answer_calls(pipe, lambda num_pages: SwapBuffer(storage(), num_pages))


def has_own_pools(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether each member of an instance has a KV pool of its own.

    Raises ConfigError where members can't share one.
    """
    is_alone = config.tensor_parallel * config.stages == 1
    if config.kv_pools == "shared" and device.type != "cpu" and not is_alone:
        raise ConfigError(
            f"engine.kv_pools is 'shared' on {device}; ranks and stages share memory on the host "
            "alone"
        )
    if config.kv_pools == "shared" and config.stage_hosts:
        raise ConfigError(
            f"engine.kv_pools is 'shared' and engine.stage_hosts {config.stage_hosts!r}; hosts "
            "share no memory"
        )
    is_apart = device.type != "cpu" or bool(config.stage_hosts)
    is_own = config.kv_pools == "own" or (config.kv_pools == "auto" and is_apart)
    return is_own and not is_alone


def agreed_pages(
    group: RankGroup,
    config: EngineConfig,
    least_bytes: int,
    one_page: KvLayout,
    *,
    sharers: int | None = None,
    layers: int | None = None,
) -> int:
    """Returns how many pages the pool of the group's rank with the least memory can have.

    `least_bytes`: for all pools together, on the host. `one_page`: of the whole instance.
    `sharers`, `layers`: as of `Room`; None: those of a model in one stage. Raises ConfigError as
    `member_pages` does, and RankError when another rank fails.
    """
    room = Room(
        config=config,
        least_bytes=least_bytes,
        one_page=one_page,
        layers=one_page.num_layers if layers is None else layers,
        sharers=group.sharers if sharers is None else sharers,
    )
    group.send(Instruction(room))
    own = room.pages_on(group.device)
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
