"""Runs a later stage of an instance in its own process, started by the first stage's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from millrace.concurrency import leave_terminal_to_parent
from millrace.engine.forward.passes import Passes
from millrace.engine.forward.stage_passes import StagePasses, stage_pool
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import Load
from millrace.engine.parallel.follower import end_with_parent
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.kv_memory import mapped
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.pipeline.messages import Died, Done, Open
from millrace.engine.pipeline.stage_loop import StageLoop
from millrace.instance.stages.stage_rows import (
    IncomingRows,
    OutgoingRows,
    room_for_rows,
    transport_of_rows,
)
from millrace.transfer.activations import Inlet
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace_kernels import determinism

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """The settings of a stage's process. `timeout_s`: for the next stage to take rows.
    `checksums`: rows are sent and taken with sums.
    """

    name: str  # name of the transport
    host: str
    ranks: int
    threads: int  # per rank
    max_rows: int  # per pass
    timeout_s: float
    checksums: bool


@dataclass(frozen=True, slots=True)
class Met:
    """The answer to `Open`: the address of this stage's transport for its neighbours."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Follow:
    """The command to take rows from the `previous` stage; the answer is an `Inlet`."""

    previous: Met


@dataclass(frozen=True, slots=True)
class Lead:
    """The command to send rows to the next stage; the answer is `Done`. Passes follow."""

    inlet: Inlet


def serve_stage(place: StagePlace, pipe: Connection) -> None:
    """Runs the stage until the first stage ends, its commands end, or an error occurs."""
    leave_terminal_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()
    for name, value in transport_environment(place.host).items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(place.threads)
    try:
        pipe.send(Done())
        with torch.inference_mode():
            _serve(place, pipe)
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # the first stage reports any error of the engine
        with suppress(ConnectionError):
            pipe.send(Died(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _serve(place: StagePlace, pipe: Connection) -> None:
    group = RankGroup(place.ranks, threads=place.threads) if place.ranks > 1 else None
    try:
        _run(place, pipe, _open(pipe, group))
    finally:
        if group is not None:
            group.close()


def _run(place: StagePlace, pipe: Connection, passes: Passes) -> None:
    model = passes.model
    transport = transport_of_rows(
        place.name, checksums=place.checksums, on_corrupt=lambda error: loop.fail(error)
    )
    sizes = place.max_rows, model.config.hidden_size, model.dtype
    out = OutgoingRows(transport, room_for_rows(*sizes), place.timeout_s)
    loop = StageLoop(passes, out, pipe.send)
    incoming = IncomingRows(transport, room_for_rows(*sizes), loop.hand)
    metadata = transport.metadata()
    pipe.send(Met(place.name, metadata))
    follow = pipe.recv()
    assert isinstance(follow, Follow)
    transport.connect(follow.previous.metadata).result(CONNECT_TIMEOUT_S)
    pipe.send(incoming.receiver.inlet(metadata, follow.previous.name))
    lead = pipe.recv()
    assert isinstance(lead, Lead)
    peer = transport.connect(lead.inlet.agent_metadata).result(CONNECT_TIMEOUT_S)
    out.sender.open(lead.inlet, peer)
    with transport.listening():
        pipe.send(Done())
        threading.Thread(target=_listen, args=(pipe, loop), daemon=True).start()
        loop.run()
    if passes.processes is not None:
        passes.processes.close()
    transport.close()


def _open(pipe: Connection, group: RankGroup | None) -> Passes:
    load = pipe.recv()
    assert isinstance(load, Load)
    model = load_stage(load, group)
    pipe.send(Done())
    command = pipe.recv()
    assert isinstance(command, Open)
    handle = recv_handle(pipe)
    try:
        return open_passes(model, load.stage, command, handle, group)
    finally:
        os.close(handle)


def load_stage(
    load: Load, group: RankGroup | None, progress: Callable[[float], None] | None = None
) -> Model:
    """Loads the stage's layers of the model; with a group, each rank loads its share. Raises as
    `load_model`, and RankError when another rank fails."""
    determinism.use(load.deterministic)
    read: Callable[..., Model] = partial(load_model, device="cpu")
    if group is not None:
        read = partial(load_ranks, group, deterministic=load.deterministic)
    return read(
        load.folder,
        dtype=load.dtype,
        load_format=load.load_format,
        seed=load.seed,
        progress=progress,
        stage=load.stage,
    )


def open_passes(
    model: Model, stage: Stage, command: Open, handle: int, group: RankGroup | None
) -> Passes:
    """Opens the passes of the model from `load_stage` over the KV memory of `handle`."""
    layout, backend = command.layout, command.attention_backend
    if group is not None:
        return GroupPasses(group, model, layout, backend, stage=stage, handle=handle)
    memory = mapped(layout, handle)[0]
    pool = stage_pool(model, layout, memory)
    return StagePasses(model, pool, backend, stage=stage, memory=memory)


def _listen(pipe: Connection, loop: StageLoop) -> None:
    """Gives the first stage's commands to the loop, until the first stage is gone."""
    try:
        while True:
            loop.send(pipe.recv())
    except (EOFError, OSError):
        loop.close()
