"""Runs a later stage of an instance in its own process, started by the first stage's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
from torch import Tensor

from millrace.concurrency import leave_terminal_to_parent
from millrace.core.config import EngineConfig
from millrace.core.kv.layout import KvLayout
from millrace.engine.forward.passes import Passes
from millrace.engine.forward.stage_passes import StagePasses, stage_pool
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import Load, Room
from millrace.engine.parallel.follower import Beside, begin_beside, end_with_parent
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.kv_memory import mapped
from millrace.engine.parallel.member_pools import agreed_pages
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.pipeline.messages import Answer, Died, Done, Open
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
    devices: tuple[str, ...]  # of the stage's ranks
    threads: int  # per rank
    max_rows: int  # per pass
    timeout_s: float
    checksums: bool
    folder: str = ""  # of the model on this host; "": where `Load` says


@dataclass(frozen=True, slots=True)
class Met:
    """The answer to `Open`: the address of this stage's transport for its neighbours."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The command to say for how many pages the stage has memory; the answer is `Measured`.

    `one_page`: of the whole instance. `least_bytes`: of all pools together, on the host.
    `sharers`: by stage, the members on the device that has most members, among the stage's devices.
    """

    config: EngineConfig
    one_page: KvLayout
    least_bytes: int
    sharers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The answer to `Measure`."""

    pages: int


@dataclass(frozen=True, slots=True)
class Follow:
    """The command to take rows from the `previous` stage; the answer is an `Inlet`."""

    previous: Met


@dataclass(frozen=True, slots=True)
class Lead:
    """The command to send rows to the next stage; the answer is `Done`. Passes follow."""

    inlet: Inlet


def serve_stage(
    place: StagePlace,
    pipe: Connection,
    beside: Mapping[str, tuple[Beside, Sequence[Connection]]],
) -> None:
    """Runs the stage until the first stage ends, its commands end, or an error occurs.

    `beside`: what each rank of the stage serves beside its passes, with the ranks' ends of the
    pipes to the first stage.
    """
    leave_terminal_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()
    for name, value in transport_environment(place.host).items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(place.threads)
    device = torch.device(place.devices[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        pipe.send(Done())
        with torch.inference_mode():
            _serve(place, pipe, beside)
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # the first stage reports any error of the engine
        with suppress(ConnectionError):
            pipe.send(Died(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _serve(
    place: StagePlace,
    pipe: Connection,
    beside: Mapping[str, tuple[Beside, Sequence[Connection]]],
) -> None:
    group = None
    if len(place.devices) > 1:
        group = RankGroup(
            len(place.devices),
            devices=place.devices,
            threads=place.threads,
            beside={name: serve for name, (serve, _) in beside.items()},
            ends={name: ends[1:] for name, (_, ends) in beside.items()},
        )
        for _, ends in beside.values():
            for end in ends[1:]:
                end.close()
    opened: Future[Tensor] = Future()
    own = {name: (serve, ends[0]) for name, (serve, ends) in beside.items()}
    begin_beside(own, torch.device(place.devices[0]), opened.result, 0)
    try:
        _run(place, pipe, *_open(place, pipe, group, opened))
    finally:
        if group is not None:
            group.close()


def _run(place: StagePlace, pipe: Connection, passes: Passes, own_pools: bool) -> None:
    model = passes.model
    transport = transport_of_rows(
        place.name, checksums=place.checksums, on_corrupt=lambda error: loop.fail(error)
    )
    sizes = place.max_rows, model.config.hidden_size, model.dtype
    out = OutgoingRows(transport, room_for_rows(*sizes), place.timeout_s)
    loop = StageLoop(passes, out, _Answers(pipe).send, own_pools=own_pools)
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


class _Answers:
    """Sends answers of any thread: on a GPU layers are reported beside the passes."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, answer: Answer) -> None:
        with self._sending:
            self._pipe.send(answer)


def _open(
    place: StagePlace, pipe: Connection, group: RankGroup | None, opened: Future[Tensor]
) -> tuple[Passes, bool]:
    """Returns the stage's passes, and whether each stage has a pool of its own. Sets `opened` to
    the storage of the stage's pool."""
    device = torch.device(place.devices[0])
    load = pipe.recv()
    assert isinstance(load, Load)
    load = replace(load, folder=place.folder or load.folder)
    model = load_stage(load, device, group)
    pipe.send(Done())
    command = pipe.recv()
    if isinstance(command, Measure):
        pipe.send(Measured(measured_pages(command, load.stage, device, group)))
        command = pipe.recv()
    assert isinstance(command, Open)
    handle = recv_handle(pipe) if command.is_shared else None
    try:
        passes = open_passes(model, load.stage, command, handle, group)
    finally:
        if handle is not None:
            os.close(handle)
    opened.set_result(passes.pool.storage)
    return passes, not command.is_shared


def load_stage(
    load: Load,
    device: torch.device,
    group: RankGroup | None,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Loads the stage's layers of the model; with a group, each rank loads its share. Raises as
    `load_model`, and RankError when another rank fails."""
    determinism.use(load.alike)
    read: Callable[..., Model] = partial(load_model, device=str(device))
    if group is not None:
        read = partial(load_ranks, group, alike=load.alike)
    return read(
        load.folder,
        dtype=load.dtype,
        load_format=load.load_format,
        seed=load.seed,
        progress=progress,
        stage=load.stage,
    )


def measured_pages(
    ask: Measure, stage: Stage, device: torch.device, group: RankGroup | None
) -> int:
    """Returns how many pages the pool of the stage's rank with the least memory can have. Raises
    ConfigError when it can have none, RankError when another rank fails."""
    layers = len(stage.layers(ask.one_page.num_layers))
    sharers = ask.sharers[stage.index]
    if group is not None:
        least, one_page = ask.least_bytes, ask.one_page
        return agreed_pages(group, ask.config, least, one_page, sharers=sharers, layers=layers)
    room = Room(
        config=ask.config,
        least_bytes=ask.least_bytes,
        one_page=ask.one_page,
        layers=layers,
        sharers=sharers,
    )
    return room.pages_on(device)


def open_passes(
    model: Model, stage: Stage, command: Open, handle: int | None, group: RankGroup | None
) -> Passes:
    """Opens the passes of the model from `load_stage` over the KV memory of `handle`; None: over
    pools of their own."""
    layout, backend = command.layout, command.attention_backend
    if group is not None:
        return GroupPasses(group, model, layout, backend, stage=stage, handle=handle)
    memory = None if handle is None else mapped(layout, handle)[0]
    pool = stage_pool(model, layout, memory)
    return StagePasses(model, pool, backend, stage=stage, memory=memory)


def _listen(pipe: Connection, loop: StageLoop) -> None:
    """Gives the first stage's commands to the loop, until the first stage is gone."""
    try:
        while True:
            loop.send(pipe.recv())
    except (EOFError, OSError):
        loop.close()
