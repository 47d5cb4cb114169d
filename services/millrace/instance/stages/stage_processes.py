"""The later stages of an instance as processes, which the first stage starts, commands and watches.

Rows go between the stages over the transport (SPP, Mnemosyne section 4.3).
"""

from __future__ import annotations

import atexit
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any, Final, TypeVar

from torch import Tensor

from millrace.core.config import EngineConfig
from millrace.engine.forward.passes import Passes
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import Load
from millrace.engine.parallel.follower import Beside
from millrace.engine.pipeline.in_flight import StageError
from millrace.engine.pipeline.messages import Answer, Command, Died, Done, Open
from millrace.engine.pipeline.runner import PipelineRunner
from millrace.instance.stages.child_stage import ChildStage, LaterStage
from millrace.instance.stages.remote.remote_stage import RemoteStage
from millrace.instance.stages.stage_hosts import stage_addresses
from millrace.instance.stages.stage_process import (
    CONNECT_TIMEOUT_S,
    Follow,
    Lead,
    Measure,
    Met,
    StagePlace,
)
from millrace.instance.stages.stage_rows import (
    IncomingRows,
    OutgoingRows,
    room_for_rows,
    transport_of_rows,
)
from millrace.transfer.activations import Inlet
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.remote import close_pipe

log = logging.getLogger(__name__)

#: Seconds for a stage's process to import torch, while others may, and to answer at the start.
START_TIMEOUT_S: Final = 120.0
_STEP_TIMEOUT_S: Final = 60.0
_FAREWELL_S: Final = 5.0
_NEWS_S: Final = 5.0
_REACH_TIMEOUT_S: Final = 1800.0  # a pod may have to pull its image first

_T = TypeVar("_T")


class StageProcesses:
    """The later stages of an instance: `LaterStages` of a `PipelineRunner`. ``count``: how many."""

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        threads: int,
        devices: Sequence[str],
        beside: Mapping[str, Beside],
        *,
        checksums: bool,
    ) -> None:
        """`devices`: of all members, the first stage's included. `beside`: what each member serves
        beside its passes."""
        self.count = config.stages - 1
        self._addresses = stage_addresses(config)
        self._ranks = config.tensor_parallel
        self._devices = tuple(devices)
        self._beside = dict(beside)
        self._host = host
        self._threads = threads
        self._checksums = checksums
        self._max_rows = config.max_chunk_tokens + config.max_batch
        self._name = f"stages-{uuid.uuid4().hex[:12]}"
        self._stages: list[LaterStage] = []
        self._telling = threading.Lock()
        self._transport: Transport | None = None
        self._listening: Any = None
        self._reader: threading.Thread | None = None
        self._closing = False

    def start(self, model: tuple[str, str]) -> None:
        """Starts all later stages; `load` waits for them. `model`: as of `RemoteStage`."""
        atexit.register(self.close)  # else the process waits for them at exit
        for index in range(1, self.count + 1):
            place = StagePlace(
                name=f"{self._name}-{index}",
                host=self._host,
                devices=self._devices[index * self._ranks : (index + 1) * self._ranks],
                threads=self._threads,
                max_rows=self._max_rows,
                timeout_s=_STEP_TIMEOUT_S,
                checksums=self._checksums,
            )
            if self._addresses:
                address = self._addresses[index - 1]
                self._stages.append(RemoteStage(address, model, place, tuple(self._beside)))
            else:
                self._stages.append(ChildStage(place, self._beside))
        for stage in self._stages:
            if isinstance(stage, RemoteStage):
                _await(stage)

    @property
    def besides(self) -> list[Mapping[str, Sequence[Connection]]]:
        """Returns the pipes to what each member serves beside its passes, by stage."""
        return [stage.besides for stage in self._stages]

    def load(self, load: Load) -> None:
        """Makes the stages read their weights, as `load` says; `collect` then takes each `Done`."""
        self.collect(Done, START_TIMEOUT_S)
        for index, pipe in enumerate(self._pipes, start=1):
            pipe.send(replace(load, stage=Stage(index, self.count + 1)))

    def send_all(self, command: Open | Measure, handle: int | None = None) -> None:
        """Sends a command of the start to all stages, with a file descriptor if it asks for one."""
        for stage in self._stages:
            stage.pipe.send(command)
            if handle is not None:
                assert isinstance(stage, ChildStage)  # else each member has a pool of its own
                send_handle(stage.pipe, handle, stage.pid)

    def connect(
        self, passes: Passes, pool: KvPool, storage: Tensor, whole: ModelConfig, *, own_pools: bool
    ) -> PipelineRunner:
        """Connects the stages into a chain that begins and ends at this stage. The arguments are
        those of `PipelineRunner`."""
        model = passes.model
        transport = self._transport = transport_of_rows(
            f"{self._name}-0",
            checksums=self._checksums,
            on_corrupt=lambda error: self._fail(runner, out, error),
        )
        sizes = self._max_rows, model.config.hidden_size, model.dtype
        out = OutgoingRows(transport, room_for_rows(*sizes), _STEP_TIMEOUT_S)
        runner = PipelineRunner(
            passes, pool, storage, whole, out, self, _STEP_TIMEOUT_S, own_pools=own_pools
        )
        incoming = IncomingRows(transport, room_for_rows(*sizes), runner.in_flight.hand)
        metadata = transport.metadata()
        met = [Met(transport.name, metadata), *self.collect(Met, START_TIMEOUT_S)]
        for index, pipe in enumerate(self._pipes):
            pipe.send(Follow(met[index]))
        inlets = self.collect(Inlet, CONNECT_TIMEOUT_S)
        transport.connect(met[-1].metadata).result(CONNECT_TIMEOUT_S)
        inlets.append(incoming.receiver.inlet(metadata, met[-1].name))
        for pipe, inlet in zip(self._pipes, inlets[1:], strict=True):
            pipe.send(Lead(inlet))
        peer = transport.connect(inlets[0].agent_metadata).result(CONNECT_TIMEOUT_S)
        out.sender.open(inlets[0], peer)
        self.collect(Done, CONNECT_TIMEOUT_S)
        self._listening = transport.listening()
        self._listening.__enter__()
        self._reader = threading.Thread(
            target=self._read, args=(runner, out), name="stages", daemon=True
        )
        self._reader.start()
        return runner

    def collect(self, kind: type[_T], timeout_s: float) -> list[_T]:
        """Collects one answer per stage during the start. Raises StageError when one is missing."""
        found: list[_T] = []
        for index, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv() if pipe.poll(timeout_s) else None
            except (EOFError, OSError):
                raise StageError(self._ending(index)) from None
            if isinstance(answer, Died):
                raise StageError(f"stage {index + 1} failed: {answer.error}")
            if not isinstance(answer, kind):
                raise StageError(f"stage {index + 1} sent no answer for {timeout_s:g} s")
            found.append(answer)
        return found

    def send(self, command: Command, stage: int | None = None) -> None:
        """Sends a command to one stage, or to all. Raises StageError when a stage is gone."""
        chosen = range(self.count) if stage is None else (stage,)
        with self._telling:
            for index in chosen:
                try:
                    self._pipes[index].send(command)
                except (OSError, ValueError):
                    raise StageError(self._ending(index)) from None

    def close(self) -> None:
        """Ends all stages and kills those that do not end. May be called twice."""
        self._closing = True
        atexit.unregister(self.close)
        for pipe in self._pipes:
            pipe.close()  # a stage ends when its pipe ends
        for of_ranks in (ends for stage in self._stages for ends in stage.besides.values()):
            for pipe in of_ranks:
                close_pipe(pipe)
        for stage in self._stages:
            stage.close()
        if self._reader is not None:
            self._reader.join(_FAREWELL_S)
        if self._listening is not None:
            self._listening.__exit__(None, None, None)
            self._listening = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- on the reader's thread

    def _read(self, runner: PipelineRunner, out: OutgoingRows) -> None:
        """Gives the stages' answers to the runner. Answers of the last stage come after all that
        earlier stages had answered before."""
        try:
            while not self._closing:
                ready = wait(self._pipes, 1.0)
                last = self._answers(len(self._pipes) - 1, ready)
                for index in range(len(self._pipes) - 1):
                    for answer in self._answers(index, None if last else ready):
                        runner.in_flight.receive(answer)
                for answer in last:
                    runner.in_flight.receive(answer)
        except StageError as error:
            if not self._closing:
                self._fail(runner, out, error)
        except OSError:
            return  # our ends of the pipes are closed

    def _fail(self, runner: PipelineRunner, out: OutgoingRows, error: StageError) -> None:
        log.error("%s", error)
        runner.in_flight.fail(error)
        out.sender.close(str(error))

    def _answers(self, index: int, ready: list[Any] | None) -> list[Answer]:
        """Reads a stage's answers. ready: the pipes with data; None: polls the pipe anyway."""
        pipe = self._pipes[index]
        if ready is not None and pipe not in ready:
            return []
        found: list[Answer] = []
        try:
            while pipe.poll(0):
                answer = pipe.recv()
                if isinstance(answer, Died):
                    raise StageError(f"stage {index + 1} failed: {answer.error}")
                found.append(answer)
        except (EOFError, ConnectionError):  # reset: the stage died with unread data
            raise StageError(self._ending(index)) from None
        return found

    def _ending(self, index: int) -> str:
        stage = self._stages[index]
        how = stage.ending(1.0)
        ended = f"died, {how}" if how else "closed its pipe"
        return f"stage {index + 1}{stage.where} {ended}"

    @property
    def _pipes(self) -> list[Connection]:
        return [stage.pipe for stage in self._stages]


def _await(stage: RemoteStage) -> None:
    """Waits until the stage has begun. Raises StageError when its host is not there in time."""
    if not stage.has_begun(_NEWS_S):
        log.warning("a stage has not begun; this process waits for its host%s", stage.where)
        if not stage.has_begun(_REACH_TIMEOUT_S):
            raise StageError(f"the host of a stage{stage.where} was not there in time")
