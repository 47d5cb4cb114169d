"""Ranks 1 and on: each a process that computes with its part of the model what rank 0 commands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import assert_never

import torch
from torch import Tensor

from millrace.concurrency import leave_terminal_to_parent
from millrace.engine.attention.kvp_owner import RemoteAttention
from millrace.engine.device.run_ahead import Pace, RunAhead
from millrace.engine.forward.passes import Boundary, Fetch
from millrace.engine.forward.stage_passes import StagePasses, stage_pool
from millrace.engine.kv.page_table import TableMirror
from millrace.engine.model.communicator import Communicator, PeerLost
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.operators import Activations, required
from millrace.engine.model.stage import ALONE
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.commands import (
    Begin,
    Command,
    CopyPage,
    Decode,
    Done,
    Failed,
    Instruction,
    Load,
    Open,
    Project,
    RingPass,
    Room,
    Run,
)
from millrace.engine.parallel.kv_memory import copies_of, mapped, pool_number
from millrace.engine.parallel.links.kvp import GatheredKv, MappedKv, NewKv, SharedRemote
from millrace.engine.parallel.links.ring import SharedLink
from millrace.engine.parallel.stop_counter import StopCounter
from millrace_kernels import determinism

Beside = Callable[[Connection, Callable[[], Tensor], int], None]
"""Runs on a thread of a rank beside its passes, in inference mode: with a pipe to the instance's
leader, a function that returns the storage of the rank's pool once the pool is there, and the
rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place in its group."""

    rank: int
    size: int
    device: str
    through_host: bool
    rendezvous: str
    timeout_s: float
    threads: int


def follow(
    place: RankPlace,
    orders: Connection,
    counter: StopCounter,
    beside: Mapping[str, tuple[Beside, Connection]] | None = None,
) -> None:
    """Serves rank 0's orders. Ends with rank 0, when the pipe closes, or after the first error.

    `beside`: what else the rank serves, each with its pipe.
    """
    leave_terminal_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        orders.send(Done(0))  # up; later errors are sent as messages
        with torch.inference_mode():
            follower = Follower(place, orders, counter)
            begin_beside(beside or {}, follower.device, follower.storage, place.rank)
            orders.send(Done(0))
            while True:
                orders.send(Done(follower.obey(orders.recv())))
    except (EOFError, ConnectionError):
        return
    except PeerLost as error:
        last_message = Failed(str(error), by_peer=True)
    except Exception as error:  # rank 0 reports the errors of all ranks
        last_message = Failed(f"{type(error).__name__}: {error}", by_peer=False)
    with suppress(ConnectionError):
        orders.send(last_message)
    raise SystemExit(1)


def begin_beside(
    beside: Mapping[str, tuple[Beside, Connection]],
    device: torch.device,
    storage: Callable[[], Tensor],
    rank: int,
) -> None:
    """Begins what a process serves beside its passes, each on a thread of its own."""

    def work(serve: Beside, pipe: Connection) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        with torch.inference_mode():
            serve(pipe, storage, rank)

    for name, (serve, pipe) in beside.items():
        threading.Thread(target=work, args=(serve, pipe), name=name, daemon=True).start()


class Follower:
    """The state of one rank: its part of the model, its pool, its suspended passes."""

    def __init__(self, place: RankPlace, orders: Connection, counter: StopCounter) -> None:
        torch.set_num_threads(place.threads)
        self.device = torch.device(place.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._shard = TpShard(place.rank, place.size)
        self._orders = orders
        self._counter = counter
        self._ranks = Communicator(
            place.rank,
            place.size,
            device=self.device,
            rendezvous=place.rendezvous,
            timeout_s=place.timeout_s,
            through_host=place.through_host,
        )
        self._run_ahead = RunAhead(self.device)
        self._passes: dict[int, _Pass] = {}
        self._stage = ALONE
        self._model: Model | None = None
        self._part: StagePasses | None = None
        self._new_kv: NewKv | None = None
        self._page_table = TableMirror()  # rank 0's
        self._opened: Future[Tensor] = Future()

    def storage(self) -> Tensor:
        """Returns the storage of the pool; waits until rank 0 opens it. Any thread may call it."""
        return self._opened.result()

    def obey(self, order: Instruction) -> int:
        """Carries an order out. Returns the count of `Done`."""
        for number in order.dropped:
            del self._passes[number]
        return self._carry_out(order.command)

    def _carry_out(self, command: Command) -> int:
        match command:
            case Load():
                self._load(command)
            case Room():
                return command.pages_on(self.device)
            case Open():
                self._open(command)
            case Run():
                return self._run(command)
            case Decode():
                self._decode(command)
            case Project():
                self._project(command)
            case CopyPage():
                storage = self._running.pool.storage
                storage[:, command.target].copy_(storage[:, command.source])
                self._settle()
            case _:
                assert_never(command)
        return 0

    @property
    def _running(self) -> StagePasses:
        return required(self._part)  # rank 0 opens before it runs

    def _load(self, command: Load) -> None:
        self._passes.clear()
        self._part = self._model = None
        self._stage = command.stage
        determinism.use(command.alike)
        self._model = load_model(
            command.folder,
            device=self.device,
            dtype=command.dtype,
            load_format=command.load_format,
            seed=command.seed,
            shard=self._shard,
            stage=command.stage,
        )

    def _open(self, command: Open) -> None:
        model = required(self._model)  # rank 0 loads before it opens
        layout, memory = command.layouts[self._shard.rank], None
        self._new_kv = GatheredKv(self._ranks, copies_of(layout, self._shard.size))
        if command.is_shared:
            self._new_kv = MappedKv()
            handle = recv_handle(self._orders)
            try:
                memory = mapped(layout, handle)[pool_number(layout)]
            finally:
                os.close(handle)
        self._page_table = TableMirror()  # as rank 0's
        self._part = StagePasses(
            model,
            stage_pool(model, layout, memory),
            command.attention_backend,
            stage=self._stage,
            memory=memory,
            ranks=self._ranks,
        )
        if self._opened.done():
            self._opened = Future()
        self._opened.set_result(self._part.pool.storage)

    def _run(self, command: Run) -> int:
        if command.begin is not None:
            self._passes[command.number] = self._begin(command.begin)
        current = self._passes[command.number]
        while self._enters(current):
            boundary = next(current.steps, None)
            if boundary is None:
                del self._passes[command.number]
                break
            current.operators += 1
            current.pace.operator = boundary.operator
            self._run_ahead.step(current.pace)
        self._settle()
        return current.operators

    def _settle(self) -> None:
        """Waits for the device. What rank 0 hears by the answer: the KV lies there, and no kernel
        writes more of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _begin(self, begin: Begin) -> _Pass:
        if isinstance(begin, RingPass):
            link = SharedLink(self._ranks, None, begin.rank, begin.size)
            task = begin.unpacked(link)
            steps = self._running.ring(task, fetch=self._fetch, finish=_leave)
            return _Pass(steps, Pace(len(task.token_ids)), is_ring=True)
        tables, remote = begin.unpacked(self._page_table), None
        if tables.remote:
            to_workers = SharedRemote(self._ranks, required(self._new_kv))
            remote = RemoteAttention(to_workers, tables.remote, tables.slots)
        return _Pass(
            self._running.run(
                tables,
                is_cut=begin.is_cut,
                kv_only=begin.kv_only,
                fetch=self._fetch,
                finish=_leave,
                remote=remote,
            ),
            Pace(len(tables.token_ids)),
        )

    @property
    def _fetch(self) -> Fetch | None:
        """Returns how a pass gets the rows of the stage before: from rank 0."""
        return None if self._stage.is_first else self._ranks.broadcast

    def _enters(self, current: _Pass) -> bool:
        """Returns whether this rank may begin the pass's next operator.

        A step of the ring begins only with rank 0: the step waits for other instances, which may
        have stopped before.
        """
        if (
            current.is_ring
            and self._running.is_attn(current.operators)
            and not self._ranks.broadcast_flag()
        ):
            return False
        return self._counter.enter(self._shard.rank, current.operators)

    def _decode(self, command: Decode) -> None:
        table = self._page_table.apply(command.page_table)
        token_ids, positions, kv_lens = map(
            torch.from_numpy, (command.token_ids, command.positions, command.kv_lens)
        )
        self._running.decode(token_ids, positions, table, kv_lens)

    def _project(self, command: Project) -> None:
        model = self._running.model
        shape = (command.rows, model.config.hidden_size)
        hidden = torch.empty(shape, dtype=model.dtype, device=self.device)
        self._ranks.broadcast(hidden)
        self._running.project(hidden)


@dataclass(slots=True)
class _Pass:
    steps: Iterator[Boundary]
    pace: Pace
    is_ring: bool = False
    operators: int = 0  # that have run


def _leave(state: Activations) -> None:
    """Does nothing: rank 0 hands out the results of the pass."""


def end_with_parent() -> None:
    """Ends this process as soon as rank 0 is gone, even in the middle of a collective."""
    parent = parent_process()
    assert parent is not None  # a follower is started as a child
    parent.join()
    os._exit(1)
