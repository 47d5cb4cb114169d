"""Starts the later stages of an instance from its first stage, and opens the engine over all.

The KV of all stages lies in shared memory, or in a pool of each member that the first stage's
transport reaches; other instances exchange KV with one instance either way. Rows go between the
stages over the transport (SPP, Mnemosyne section 4.3).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, engine_of, resolve_device, use_determinism
from millrace.engine.device.graph_sizes import graph_sizes
from millrace.engine.kv.pool import KvPool
from millrace.engine.kv_shape import KvShape
from millrace.engine.model.loader import Model
from millrace.engine.model.stage import Stage
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.commands import Load
from millrace.engine.parallel.follower import Beside
from millrace.engine.parallel.kv_memory import mapped, new_memory
from millrace.engine.parallel.member_pools import MemberPools, has_own_pools, services
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.pipeline.messages import (
    Done,
    Open,
)
from millrace.engine.pipeline.runner import PipelineRunner
from millrace.engine.sizing import compute_threads, pool_bytes
from millrace.instance.stages.stage_hosts import devices_of_members, stage_addresses
from millrace.instance.stages.stage_process import (
    Measure,
    Measured,
    load_stage,
    measured_pages,
    open_passes,
)
from millrace.instance.stages.stage_processes import START_TIMEOUT_S, StageProcesses

_LOAD_TIMEOUT_S: Final = 3600.0


def open_staged_engine(
    model: str,
    config: EngineConfig,
    host: str,
    progress: Callable[[float], None] | None = None,
    revision: str = "",
    *,
    checksums: bool = False,
    transport: Beside | None = None,
    devices: Sequence[str] = (),
) -> Engine:
    """Opens an engine of `config.stages` stages, the first in this process; else as `open_engine`.

    `checksums`: activations go between stages with crc32c sums. `transport`: what moves the KV of
    members that have pools of their own. `devices`: of all members, stage after stage; without
    them member i gets device i from `config.device` on.

    Raises ConfigError when stages are impossible, StageError when a stage does not start.
    """
    device = resolve_device(config.device)
    own_pools = has_own_pools(config, device)
    alike = use_determinism(model, config, device)
    shape = KvShape.of_one_page(model, config, device, revision)
    dtype = getattr(torch, shape.layout.dtype)
    graph_sizes(config, shape.model.head_dim, device, dtype, shape.max_context_tokens)  # refuses
    ranks = config.tensor_parallel
    Stage(0, config.stages).check(shape.model)  # before any process is started
    TpShard(0, ranks).check(shape.model)
    of_members = tuple(devices) or devices_of_members(config, device)
    here = ranks if stage_addresses(config) else config.stages * ranks
    threads = max(1, compute_threads(config) // here)
    torch.set_num_threads(threads)
    beside = services(transport) if own_pools else {}
    stages = StageProcesses(config, host, threads, of_members, beside, checksums=checksums)
    group = None
    try:
        load = Load(
            folder=str(shape.folder),
            dtype=config.dtype,
            load_format=config.load_format,
            seed=0,
            stage=Stage(0, config.stages),
            alike=alike,
        )
        stages.start((shape.layout.model_hash, config.load_format))
        if ranks > 1:
            group = RankGroup(
                ranks, devices=of_members[:ranks], threads=threads, name="stage 0, ", beside=beside
            )
        stages.load(load)
        own = load_stage(load, torch.device(of_members[0]), group, progress)
        stages.collect(Done, _LOAD_TIMEOUT_S)
        first = _First(load.stage, own, group)
        if not own_pools:
            shape = shape.sized(pool_bytes(config, device, shape.least_bytes))
            return engine_of(shape, _opened(stages, first, shape, config), config)
        shape = _measured(stages, first, shape, config, _sharers(of_members, ranks))
        runner = _opened_with_own_pools(stages, first, shape, config)
        pipes = [{} if group is None else group.besides, *stages.besides]
        elsewhere = bool(stage_addresses(config))
        members = MemberPools.of(shape.layout, pipes, later_elsewhere=elsewhere)
        return engine_of(shape, runner, config, members)
    except BaseException:
        if group is not None:
            group.close()
        stages.close()
        raise


@dataclass(frozen=True, slots=True)
class _First:
    """The first stage, in this process: its place, its model, and its ranks if it has several."""

    stage: Stage
    model: Model
    group: RankGroup | None


def _measured(
    stages: StageProcesses,
    first: _First,
    shape: KvShape,
    config: EngineConfig,
    sharers: tuple[int, ...],
) -> KvShape:
    """Returns the shape with the pages for which the member with the least memory has room."""
    ask = Measure(
        config=config, one_page=shape.layout, least_bytes=shape.least_bytes, sharers=sharers
    )
    stages.send_all(ask)
    here = measured_pages(ask, first.stage, first.model.device, first.group)
    there = [answer.pages for answer in stages.collect(Measured, START_TIMEOUT_S)]
    return shape.with_pages(min(here, *there), config)


def _opened(
    stages: StageProcesses, first: _First, shape: KvShape, config: EngineConfig
) -> PipelineRunner:
    """Opens the pools of all members in one memory, and connects the stages."""
    command = _open_command(shape, config, is_shared=True)
    handle = new_memory(command.layout)
    try:
        stages.send_all(command, handle)
        storage = mapped(command.layout, handle)
        passes = open_passes(first.model, first.stage, command, handle, first.group)
    finally:
        os.close(handle)
    pool = KvPool(command.layout, first.model.device, storage[0])
    return stages.connect(passes, pool, storage, shape.model, own_pools=False)


def _opened_with_own_pools(
    stages: StageProcesses, first: _First, shape: KvShape, config: EngineConfig
) -> PipelineRunner:
    """Opens the pool of each member, and connects the stages."""
    command = _open_command(shape, config, is_shared=False)
    stages.send_all(command)
    passes = open_passes(first.model, first.stage, command, None, first.group)
    return stages.connect(passes, passes.pool, passes.storage, shape.model, own_pools=True)


def _open_command(shape: KvShape, config: EngineConfig, *, is_shared: bool) -> Open:
    part = replace(shape.layout, head_count=shape.layout.part_heads, parts=1, copies=1, stages=1)
    return Open(layout=part, attention_backend=config.attention_backend, is_shared=is_shared)


def _sharers(devices: Sequence[str], ranks: int) -> tuple[int, ...]:
    """Returns `Measure.sharers`, given each member's device, stage after stage."""
    on = Counter(devices)
    each = [on[device] for device in devices]
    return tuple(max(each[i : i + ranks]) for i in range(0, len(each), ranks))
