"""A later stage of an instance, in a process of its own that the first stage's has started."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from millrace.core.kv_layout import KvLayout
from millrace.engine.kv_pool import KvPool
from millrace.engine.loader import Model, load_model
from millrace.engine.parallel.commands import Load
from millrace.engine.parallel.follower import end_with_parent
from millrace.engine.parallel.shared_pool import mapped
from millrace.engine.parallel.stage import Stage
from millrace.engine.pipeline.messages import Done, Fallen, Open
from millrace.engine.pipeline.passes import StagePasses
from millrace.engine.pipeline.stage_loop import StageLoop
from millrace.transfer.activations import Inlet
from millrace.transfer.environment import transport_environment
from millrace.transfer.nixl_transport import NixlTransport
from millrace.worker.stage_rows import IncomingRows, OutgoingRows, room_for_rows

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """What a stage's process is started with. `timeout_s`: for the next stage to take rows."""

    stage: Stage
    name: str  # of its transport
    host: str
    threads: int
    max_rows: int  # of a pass
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Met:
    """The answer to `Open`: how the stages next to this one reach it."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Follow:
    """These are to hand rows on to you; the answer is an `Inlet`."""

    previous: Met


@dataclass(frozen=True, slots=True)
class Lead:
    """Hand rows on to these, from now on; the answer is `Done`. Then passes come."""

    inlet: Inlet


def serve_stage(place: StagePlace, pipe: Connection) -> None:
    """The stage's life: ends with the first stage, when told nothing more, or with an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it is for the first stage
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
    except Exception as error:  # whatever the engine raises is for the first stage to tell
        with suppress(ConnectionError):
            pipe.send(Fallen(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _serve(place: StagePlace, pipe: Connection) -> None:
    model = _load(place, pipe)
    passes = _open(place, pipe, model)
    transport = NixlTransport(place.name)
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
    transport.close()


def _load(place: StagePlace, pipe: Connection) -> Model:
    load = pipe.recv()
    assert isinstance(load, Load)
    model = load_model(
        load.folder,
        device="cpu",
        dtype=load.dtype,
        load_format=load.load_format,
        seed=load.seed,
        stage=place.stage,
    )
    pipe.send(Done())
    return model


def _open(place: StagePlace, pipe: Connection, model: Model) -> StagePasses:
    command = pipe.recv()
    assert isinstance(command, Open)
    handle = recv_handle(pipe)
    try:
        storage = mapped(command.layout, handle)[0]
    finally:
        os.close(handle)
    layout = stage_layout(command.layout, model.layers)
    held = storage[model.layers.start : model.layers.stop]
    pool = KvPool(layout, torch.device("cpu"), held)
    return StagePasses(model, pool, place.stage, storage, command.attention_backend)


def stage_layout(layout: KvLayout, layers: range) -> KvLayout:
    """Of a stage's part of an instance's pool."""
    return replace(
        layout,
        num_layers=len(layers),
        layer_start=layers.start,
        model_layers=layout.num_layers,
    )


def _listen(pipe: Connection, loop: StageLoop) -> None:
    """Gives the loop what the first stage says, until that is gone."""
    try:
        while True:
            loop.tell(pipe.recv())
    except (EOFError, OSError):
        loop.close()
