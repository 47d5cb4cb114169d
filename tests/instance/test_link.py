"""The worker's stream against a real server that plays the scheduler."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millrace.core.kv.transfer import Incarnation
from millrace.core.scheduler.commands import Cancel, Command, Registered
from millrace.core.scheduler.reports import Heartbeat, Registration, Report, RequestReleased
from millrace.instance import link as link_module
from millrace.instance.link import WorkerLink
from millrace.wire.codec import instance as codec
from millrace.wire.pb import scheduler_pb2_grpc
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S
from support.live_stack import eventually

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
        self.answers = True
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
                if self.answers:
                    out.put_nowait(Registered(heartbeat_s=0.02))
            out.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (command := await out.get()) is not None:
                yield codec.COMMANDS.encode(command)
        finally:
            reading.cancel()


class Worker:
    """A link and its callbacks' calls. A drop ends when `drop` is set."""

    def __init__(self, address: str) -> None:
        self.seen: list[str] = []
        self.drop = asyncio.Event()
        self.drop.set()
        self.beats = 0
        self.link = WorkerLink(
            address,
            register=self._register,
            heartbeat=self._beat,
            on_command=self._take,
            on_lost=self._lost,
        )
        self.running = asyncio.create_task(self.link.run())

    def _take(self, command: Command) -> None:
        if isinstance(command, Cancel):
            self.seen.append(command.request_id)

    def _register(self) -> Registration:
        self.seen.append("register")
        return REGISTRATION

    def _beat(self) -> Heartbeat:
        self.beats += 1
        return Heartbeat(running=self.beats)

    async def _lost(self) -> None:
        self.seen.append("dropping")
        self.link.send(RequestReleased(request_id="while dropping"))
        await self.drop.wait()
        self.link.send(RequestReleased(request_id="dropped"))
        self.seen.append("dropped")


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
async def net(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Net]:
    monkeypatch.setattr(link_module, "RETRY_FIRST_S", 0.02)
    made = Net()
    await made.serve()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def worker(net: Net) -> AsyncIterator[Worker]:
    made = Worker(f"127.0.0.1:{net.port}")
    yield made
    made.drop.set()
    made.link.close()
    async with asyncio.timeout(HANG_S):
        await made.running


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
    await eventually(lambda: worker.beats >= 3)
    assert net.scheduler.streams[0][0] == REGISTRATION


async def test_nothing_is_sent_before_the_registration_was_taken(net: Net) -> None:
    net.scheduler.answers = False
    worker = Worker(f"127.0.0.1:{net.port}")
    await eventually(lambda: bool(net.scheduler.streams and net.scheduler.streams[0]))
    worker.link.send(RequestReleased(request_id="early"))
    await asyncio.sleep(0.05)

    assert len(net.scheduler.streams[0]) == 1
    assert not worker.link.connected.is_set()
    worker.link.close()
    await worker.running


async def test_drops_everything_before_it_registers_again(net: Net, worker: Worker) -> None:
    await connected(worker)
    worker.drop.clear()
    net.scheduler.say(None)
    await eventually(lambda: worker.seen[-1] == "dropping")
    await asyncio.sleep(0.1)
    assert len(net.scheduler.streams) == 1
    assert not worker.link.connected.is_set()
    worker.drop.set()

    await connected(worker)
    assert worker.seen == ["register", "dropping", "dropped", "register"]


async def test_a_new_stream_carries_nothing_of_an_earlier_life(net: Net, worker: Worker) -> None:
    await connected(worker)
    await net.stop()
    worker.link.send(RequestReleased(request_id="into the void"))
    await eventually(lambda: worker.seen[-1] == "dropped")
    await net.serve()
    await eventually(lambda: len(net.scheduler.streams) == 2)
    await connected(worker)
    worker.link.send(RequestReleased(request_id="news"))

    await eventually(lambda: released(net.scheduler.streams[1]) == ["news"])
    assert net.scheduler.streams[1][0] == REGISTRATION


async def test_keeps_trying_while_there_is_no_scheduler(net: Net, worker: Worker) -> None:
    await connected(worker)
    await net.stop()
    await eventually(lambda: worker.seen[-1] == "dropped")
    await asyncio.sleep(0.3)
    assert worker.seen.count("dropping") == 1
    await net.serve()
    await eventually(worker.link.connected.is_set)


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

    async def lost() -> None:
        return

    link = WorkerLink(
        f"127.0.0.1:{net.port}",
        register=lambda: REGISTRATION,
        heartbeat=Heartbeat,
        on_command=fail,
        on_lost=lost,
    )
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(HANG_S):
        await link.connected.wait()
        net.scheduler.say(cancel("r"))
        with pytest.raises(KeyError, match="r"):
            await running
