"""Runs a later stage for an instance whose first stage is on another host: `millrace stage`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import torch

from millrace.concurrency import cancel
from millrace.core.errors import ConfigError, MillraceError, TransferError
from millrace.engine.model.loader import model_hash
from millrace.engine.parallel.follower import Beside
from millrace.engine.parallel.rank_group import devices_of_ranks
from millrace.instance.stages.child_stage import ChildStage
from millrace.instance.stages.remote.codec import decode
from millrace.instance.stages.remote.relay import ENDED, Frame, Relay
from millrace.instance.stages.stage_process import StagePlace
from millrace.version import version
from millrace.wire.pb import stage_pb2, stage_pb2_grpc

log = logging.getLogger(__name__)

_FAREWELL_S = 5.0

Requests = AsyncIterator[stage_pb2.ToStage]
Answers = AsyncIterator[stage_pb2.FromStage]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """What this host has for a stage: its copy of the model, its address, device and threads.

    `services`: what members of an instance can serve beside their passes, by name.
    """

    folder: Path
    host: str
    device: torch.device
    threads: int
    services: Mapping[str, Beside]


class StageHostServicer(stage_pb2_grpc.StageHostServicer):
    """Runs one stage at a time."""

    def __init__(self, room: StageRoom, turn_s: float = 15.0) -> None:
        """`turn_s`: for the stage before to end, whose instance may have vanished."""
        self._room = room
        self._turn_s = turn_s
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self.runs = ""
        """The instance whose stage runs here; "" while none does."""

    def add_to(self, server: grpc.aio.Server) -> None:
        stage_pb2_grpc.add_StageHostServicer_to_server(self, server)

    async def idle(self) -> None:
        """Waits until no stage runs here."""
        await self._idle.wait()

    async def RunStage(
        self, request_iterator: Requests, context: grpc.aio.ServicerContext[Requests, Answers]
    ) -> Answers:
        """Begins a stage, carries its frames, and ends it with the stream."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "begin":
            why = "the first message must be begin"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
            return
        try:
            place, beside = await asyncio.to_thread(self._place, first.begin)
        except MillraceError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        try:
            async with asyncio.timeout(self._turn_s):
                await self._turn.acquire()
        except TimeoutError:
            why = f"a stage of {self.runs} runs here"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            return
        self.runs = first.begin.instance
        self._idle.clear()
        log.info("a stage of %s begins, for %s", self.runs, context.peer())
        try:
            async with aclosing(_run(place, beside, request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            log.info("the stage of %s has ended", self.runs)
            self.runs = ""
            self._idle.set()
            self._turn.release()

    def _place(self, begin: stage_pb2.BeginStage) -> tuple[StagePlace, Mapping[str, Beside]]:
        """Returns the stage's place on this host, and what its ranks are to serve. Raises
        MillraceError for what this host can't run.
        """
        if begin.version != (own := version()):
            raise ConfigError(
                f"this host has Millrace {own}, the instance {begin.version or 'none'}"
            )
        room, asked = self._room, decode(begin.place)
        if not isinstance(asked, StagePlace):
            raise TransferError(f"place is a {type(asked).__name__}; it must be a StagePlace")
        if unknown := set(begin.beside) - set(room.services):
            raise ConfigError(f"this host knows no service {sorted(unknown)[0]!r} of members")
        wanted = begin.model_hash.partition("@")[0]
        if (own := model_hash(room.folder, load_format=begin.load_format)) != wanted:
            raise ConfigError(
                f"the model is another one: {room.folder} here is {own}, the instance's {wanted}"
            )
        ranks = len(asked.devices)
        for device in asked.devices:
            if device.split("/")[1:2] != [room.device.type]:
                raise ConfigError(f"the stage wants {device}, and this host has {room.device}")
        visible = torch.cuda.device_count() if room.device.type == "cuda" else ranks
        if (room.device.index or 0) + ranks > visible:
            raise ConfigError(f"the stage has {ranks} ranks; this host sees {visible} devices")
        place = replace(
            asked,
            host=room.host,
            folder=str(room.folder),
            devices=devices_of_ranks(room.device, ranks),
            threads=max(1, room.threads // ranks),
        )
        return place, {name: room.services[name] for name in begin.beside}


async def _run(
    place: StagePlace, beside: Mapping[str, Beside], requests: Requests
) -> AsyncGenerator[stage_pb2.FromStage]:
    """Runs a stage to its end, or to the end of the stream."""
    loop, outgoing = asyncio.get_running_loop(), asyncio.Queue[Frame]()

    def send(frame: Frame) -> None:
        loop.call_soon_threadsafe(outgoing.put_nowait, frame)

    stage = await asyncio.to_thread(ChildStage, place, beside)
    ends = [pipe for of_ranks in stage.besides.values() for pipe in of_ranks]
    relay = Relay([stage.pipe, *ends], send)
    reading = asyncio.create_task(_read(requests, relay))
    try:
        yield stage_pb2.FromStage(begun={})
        while (frame := await outgoing.get()) != Frame(0, ENDED):
            message = stage_pb2.StageFrame(channel=frame.channel, message=frame.message)
            yield stage_pb2.FromStage(frame=message)
        how = await asyncio.to_thread(stage.ending, _FAREWELL_S)
        ended = stage_pb2.StageEnded(how=how or "it closed its pipe")
        yield stage_pb2.FromStage(ended=ended)
    finally:
        await cancel(reading)
        await asyncio.to_thread(_close, relay, stage.close)


def _close(relay: Relay, close: Callable[[], None]) -> None:
    relay.close()
    close()


async def _read(requests: Requests, relay: Relay) -> None:
    """Gives the stage what comes for it; ends its pipes with the stream."""
    try:
        async for message in requests:
            relay.receive(Frame(message.frame.channel, message.frame.message))
    except IndexError:
        log.error("a frame of a channel that the stage does not have ends the stage")
    finally:
        relay.end()
