"""The worker's stream against a real server that plays the scheduler."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler.commands import AdmitDecode, Cancel, Command, Registered
from millrace.core.scheduler.reports import (
    CachedBlocks,
    Draining,
    Heartbeat,
    PrefixLanded,
    Registration,
    Report,
    RequestReleased,
)
from millrace.instance.link import WorkerLink
from millrace.state.leader import LeaderWatch
from millrace.state.leases import LeaseStore, MemoryLeases
from millrace.wire.codec import instance as codec
from millrace.wire.pb import scheduler_pb2_grpc
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S, eventually

REGISTRATION = Registration(
    incarnation=Incarnation("p0", 7),
    role="prefill",
    address="127.0.0.1:1",
    model_hash="m",
    kv_pages=1,
    page_tokens=16,
    max_context_tokens=64,
)


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """`streams` has the reports of each stream; `say` sends on the newest stream, None ends it."""

    def __init__(self) -> None:
        self.streams: list[list[Registration | Report | None]] = []
        self.seen_epochs: list[int] = []
        self.answers = True
        self.epoch = 0
        self._out: asyncio.Queue[Command | None] = asyncio.Queue()

    def say(self, command: Command | None) -> None:
        self._out.put_nowait(command)

    async def ConnectWorker(self, request_iterator: Any, context: Any) -> Any:
        heard: list[Registration | Report | None] = []
        self.streams.append(heard)
        out = self._out = asyncio.Queue()

        async def read() -> None:
            async for message in request_iterator:
                if not message.HasField("register"):
                    heard.append(codec.REPORTS.decode(message))
                    continue
                heard.append(codec.REGISTRATION.decode(message.register))
                self.seen_epochs.append(message.seen_epoch)
                if self.answers:
                    out.put_nowait(Registered(heartbeat_s=0.02, lease="the lease"))
            out.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (command := await out.get()) is not None:
                message = codec.COMMANDS.encode(command)
                message.epoch = self.epoch
                yield message
        finally:
            reading.cancel()


class Worker:
    """A link and its callbacks' calls."""

    def __init__(self, address: str, leases: LeaseStore | None = None) -> None:
        self.seen: list[str] = []
        self.beats = 0
        self.leaders = LeaderWatch(leases or MemoryLeases(), address)
        self.link = WorkerLink(
            self.leaders,
            register=self._register,
            heartbeat=self._beat,
            cached_blocks=self._cached_blocks,
            on_command=self._take,
            retry=Backoff(0.02, 1.0),
        )
        self.running = asyncio.create_task(self.link.run())

    def _take(self, command: Command) -> None:
        if isinstance(command, Cancel):
            self.seen.append(command.request_id)
        elif isinstance(command, AdmitDecode):
            self.seen.append(command.request.request_id)

    def _register(self) -> Registration:
        self.seen.append("register")
        return REGISTRATION

    def _beat(self) -> Heartbeat:
        self.beats += 1
        return Heartbeat(running=self.beats)

    def _cached_blocks(self) -> CachedBlocks | None:
        return CachedBlocks(added=(self.beats,)) if self.beats == 2 else None


class Net:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.port = 0
        self._server: Any = None

    async def serve(self) -> None:
        self._server = create_server()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self.scheduler, self._server)
        self.port = bind(self._server, "127.0.0.1", self.port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Net]:
    made = Net()
    await made.serve()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def worker(net: Net) -> AsyncIterator[Worker]:
    made = Worker(f"127.0.0.1:{net.port}")
    yield made
    made.link.close()
    async with asyncio.timeout(HANG_S):
        await made.running


def spec(request_id: str) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        proxy=Incarnation("x", 1),
        prompt_tokens=100,
        sampling=SamplingParams(max_tokens=8),
    )


def cancel(request_id: str) -> Cancel:
    return Cancel(request_id=request_id)


def released(messages: list[Registration | Report | None]) -> list[str]:
    return [m.request_id for m in messages if isinstance(m, RequestReleased)]


async def connected(worker: Worker) -> None:
    async with asyncio.timeout(HANG_S):
        await worker.link.connected.wait()


async def test_registers_reports_and_beats(net: Net, worker: Worker) -> None:
    await connected(worker)
    net.scheduler.say(cancel("a"))
    net.scheduler.say(cancel("b"))
    worker.link.send(RequestReleased(request_id="r"))

    await eventually(lambda: worker.seen == ["register", "a", "b"])
    await eventually(lambda: released(net.scheduler.streams[0]) == ["r"])
    await eventually(lambda: Heartbeat(running=3) in net.scheduler.streams[0])
    registration, *said = net.scheduler.streams[0]
    assert registration == REGISTRATION
    second = said.index(Heartbeat(running=2))
    assert said[second + 1] == CachedBlocks(added=(2,))
    assert sum(isinstance(one, CachedBlocks) for one in said) == 1


async def test_reports_follow_the_registration(net: Net) -> None:
    net.scheduler.answers = False
    worker = Worker(f"127.0.0.1:{net.port}")
    await eventually(lambda: bool(net.scheduler.streams and net.scheduler.streams[0]))
    worker.link.send(RequestReleased(request_id="early"))
    await eventually(lambda: released(net.scheduler.streams[0]) == ["early"])
    assert not worker.link.connected.is_set()
    worker.link.close()
    await worker.running


async def test_registers_again_with_what_it_holds(net: Net, worker: Worker) -> None:
    await connected(worker)
    for name in ("over", "held"):
        net.scheduler.say(AdmitDecode(request=spec(name), attempt=2))
    await eventually(lambda: worker.seen[-1] == "held")
    worker.link.send(RequestReleased(request_id="over"))
    await net.stop()
    worker.link.send(PrefixLanded(request_id="held", attempt=2, tokens=64))
    await net.serve()
    await eventually(lambda: len(net.scheduler.streams) == 2)
    await connected(worker)
    again = net.scheduler.streams[1][0]
    assert isinstance(again, Registration)
    (held,) = again.held
    assert (held.request_id, held.attempt, held.landed_tokens) == ("held", 2, 64)
    assert net.scheduler.streams[0][0] == REGISTRATION  # nothing was held then


async def test_a_drain_is_reported_to_every_scheduler(net: Net, worker: Worker) -> None:
    await connected(worker)
    worker.link.send(Draining())
    await eventually(lambda: Draining() in net.scheduler.streams[0])
    net.scheduler.say(None)
    await eventually(lambda: len(net.scheduler.streams) == 2)
    await eventually(lambda: Draining() in net.scheduler.streams[1])


async def test_keeps_trying_while_there_is_no_scheduler(net: Net, worker: Worker) -> None:
    await connected(worker)
    await net.stop()
    await eventually(lambda: not worker.link.connected.is_set())
    await net.serve()
    await eventually(worker.link.connected.is_set)


async def test_moves_to_a_later_leader_and_takes_nothing_of_the_earlier_one(net: Net) -> None:
    other, leases = Net(), MemoryLeases()
    await other.serve()
    first = await leases.acquire("the lease", address=f"127.0.0.1:{net.port}", ttl_s=60.0)
    assert first is not None
    net.scheduler.epoch = first.epoch
    worker = Worker(f"127.0.0.1:1, 127.0.0.1:{net.port}", leases)  # nobody is at the first
    watching = asyncio.create_task(worker.leaders.run())
    await connected(worker)
    await leases.release("the lease", epoch=first.epoch)
    second = await leases.acquire("the lease", address=f"127.0.0.1:{other.port}", ttl_s=60.0)
    assert second is not None
    other.scheduler.epoch = second.epoch
    await eventually(lambda: bool(other.scheduler.streams))
    await connected(worker)
    assert not worker.leaders.fence.admits(first.epoch)
    other.scheduler.epoch = first.epoch  # a command of the past, however it comes
    other.scheduler.say(cancel("stale"))
    await eventually(lambda: len(other.scheduler.streams) >= 2)
    assert "stale" not in worker.seen
    assert other.scheduler.seen_epochs[-1] == second.epoch
    worker.link.close()
    watching.cancel()
    await asyncio.wait([worker.running, watching])
    await other.stop()


async def test_a_draining_worker_takes_no_more_commands(net: Net, worker: Worker) -> None:
    await connected(worker)
    worker.link.refuse_commands()
    net.scheduler.say(cancel("late"))
    worker.link.send(RequestReleased(request_id="last"))
    worker.link.close()

    async with asyncio.timeout(HANG_S):
        await worker.running
    assert worker.seen == ["register"]
    assert released(net.scheduler.streams[0]) == ["last"]


async def test_a_defect_in_a_command_ends_the_link(net: Net) -> None:
    def fail(command: Command) -> None:
        if isinstance(command, Cancel):
            raise KeyError(command.request_id)

    link = WorkerLink(
        LeaderWatch(MemoryLeases(), f"127.0.0.1:{net.port}"),
        register=lambda: REGISTRATION,
        heartbeat=Heartbeat,
        cached_blocks=lambda: None,
        on_command=fail,
    )
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(HANG_S):
        await link.connected.wait()
        net.scheduler.say(cancel("r"))
        with pytest.raises(KeyError, match="r"):
            await running
