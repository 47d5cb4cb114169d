"""Proxies and workers that speak to a real scheduler over real streams."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from millrace.core.config import Config, SchedulerConfig
from millrace.scheduler.main import serve
from millrace.wire.channel import open_channel
from millrace.wire.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from support.deadlines import HANG_S


def quick(**scheduler: object) -> Config:
    """Settings with short times; tests of silence shorten the lease, too."""
    defaults = {"heartbeat_s": 0.05, "lease_s": 60.0}
    return Config(scheduler=SchedulerConfig(**{**defaults, **scheduler}))


@asynccontextmanager
async def scheduler(config: Config | None = None, record: Path | None = None) -> AsyncIterator[Net]:
    """A scheduler service in this process; leaving the block ends it with SIGTERM."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(config or quick(), host="127.0.0.1", port=0, on_ready=port.set_result, record=record)
    )
    await asyncio.wait([task, port], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    net = Net(f"127.0.0.1:{port.result()}", task)
    try:
        yield net
    finally:
        await net.close()
        if not task.done():
            signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(task, HANG_S)


class Net:
    """Peers of one scheduler, each with a connection of its own."""

    def __init__(self, address: str, task: asyncio.Task[None]) -> None:
        self.address = address
        self.task = task
        self._peers: list[Peer] = []
        self._channels: list[grpc.aio.Channel] = []

    async def close(self) -> None:
        for peer in self._peers:
            await peer.cut()
        for channel in self._channels:
            await channel.close()

    def stub(self) -> scheduler_pb2_grpc.SchedulerStub:
        channel = open_channel(self.address)
        self._channels.append(channel)
        return scheduler_pb2_grpc.SchedulerStub(channel)

    def channel(self) -> grpc.aio.Channel:
        self._channels.append(open_channel(self.address))
        return self._channels[-1]

    async def worker(
        self, worker_id: str, *, beats: bool = True, seen_epoch: int = 0, **card: object
    ) -> Worker:
        """A registered worker; "p..." prefills, any other decodes."""
        worker = Worker(self.stub().ConnectWorker(), worker_id)
        self._peers.append(worker)
        message = {"register": register(worker_id, **card), "seen_epoch": seen_epoch}
        await worker.call.write(scheduler_pb2.WorkerMessage(**message))
        first = await worker.next()
        assert first.WhichOneof("kind") == "registered"
        if beats:
            worker.start_beating(first.registered.heartbeat_s)
        return worker

    async def proxy(self, proxy_id: str = "x", *, seen_epoch: int = 0) -> Proxy:
        """A connected proxy that has read its first Fleet."""
        proxy = Proxy(self.stub().ConnectProxy(), proxy_id)
        self._peers.append(proxy)
        hello = common_pb2.Incarnation(id=proxy_id, generation=1)
        await proxy.call.write(scheduler_pb2.ProxyMessage(hello=hello, seen_epoch=seen_epoch))
        await proxy.next("fleet")
        return proxy

    async def status(self) -> scheduler_pb2.StatusReply:
        return await self.stub().GetStatus(scheduler_pb2.StatusRequest(), timeout=HANG_S)


def register(worker_id: str, **card: object) -> scheduler_pb2.Register:
    defaults = {
        "address": f"127.0.0.1:{worker_id}",
        "model_hash": "h",
        "kv_pages": 100,
        "page_tokens": 16,
        "max_context_tokens": 4096,
        "max_batch": 64,
        "latency": scheduler_pb2.SpLatency(by_sp={1: scheduler_pb2.Latency(b=1e-3)}),
    }
    generation = card.pop("generation", 1)
    role = card.pop("role", "prefill" if worker_id.startswith("p") else "decode")
    return scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id=worker_id, generation=generation),
        role=scheduler_pb2.Role.Value(f"ROLE_{role}".upper()),
        **{**defaults, **card},
    )


def spec(request_id: str, prompt_tokens: int = 100, **sampling: object) -> common_pb2.RequestSpec:
    return common_pb2.RequestSpec(
        request_id=request_id,
        proxy=common_pb2.Incarnation(id="x", generation=1),
        prompt_tokens=prompt_tokens,
        sampling=common_pb2.SamplingParams(**{"max_tokens": 28, "n": 1, "seed": 7, **sampling}),
        traceparent="00-1-2-01",
    )


class Peer:
    """One stream to the scheduler."""

    def __init__(self, call: grpc.aio.StreamStreamCall, peer_id: str) -> None:
        self.call = call
        self.id = peer_id

    async def read(self) -> object:
        return await asyncio.wait_for(self.call.read(), HANG_S)

    async def cut(self) -> None:
        """Breaks the stream, as a process that dies does."""
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.call.code()


class Worker(Peer):
    def __init__(self, call: grpc.aio.StreamStreamCall, worker_id: str) -> None:
        super().__init__(call, worker_id)
        self._writing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    def start_beating(self, interval_s: float) -> None:
        self._beating = asyncio.create_task(self._beat(interval_s))

    async def _beat(self, interval_s: float) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.say(heartbeat=scheduler_pb2.Heartbeat(free_pages=9, running=1))
                await asyncio.sleep(interval_s)

    def stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def fall_silent(self) -> None:
        """Stops beating between two writes: a write at the end of a stream would replace the
        scheduler's reason by gRPC's own.
        """
        async with self._writing:
            self.stop_beating()

    async def cut(self) -> None:
        self.stop_beating()
        await super().cut()

    async def next(self, kind: str | None = None) -> scheduler_pb2.WorkerCommand:
        """The next command, which must be of the kind."""
        command = await self.read()
        assert isinstance(command, scheduler_pb2.WorkerCommand), command
        assert kind is None or command.WhichOneof("kind") == kind, command
        return command

    async def say(self, **message: object) -> None:
        async with self._writing:  # a stream takes one write at a time
            await self.call.write(scheduler_pb2.WorkerMessage(**message))

    async def computed(self, request_id: str) -> None:
        started = scheduler_pb2.ChunkStarted(request_id=request_id, chunk_index=0)
        await self.say(chunk_started=started)
        await self.say(
            chunk_finished=scheduler_pb2.ChunkFinished(
                request_id=request_id, chunk_index=0, compute_s=0.1, last=True
            )
        )

    async def released(self, request_id: str, attempt: int = 0) -> None:
        released = scheduler_pb2.RequestReleased(request_id=request_id, attempt=attempt)
        await self.say(request_released=released)

    async def decoding(self, request_id: str) -> None:
        await self.say(decode_started=scheduler_pb2.DecodeStarted(request_id=request_id))

    async def finished(self, request_id: str) -> None:
        await self.say(
            request_finished=scheduler_pb2.RequestFinished(
                request_id=request_id,
                reason=common_pb2.FINISH_REASON_STOP,
                generated_tokens=5,
            )
        )


class Proxy(Peer):
    async def next(self, kind: str) -> object:
        """The next update of a kind; that the fleet changed or a request waits is passed over."""
        while True:
            update = await self.read()
            assert isinstance(update, scheduler_pb2.ProxyUpdate), update
            found = update.WhichOneof("kind")
            if found == kind:
                return getattr(update, kind)
            assert found in ("fleet", "queued", "suspect"), update

    async def submit(self, *specs: common_pb2.RequestSpec) -> None:
        batch = scheduler_pb2.SubmitBatch(requests=specs)
        await self.call.write(scheduler_pb2.ProxyMessage(submit=batch))

    async def cancel(self, request_id: str, reason: str = "the client left") -> None:
        cancel = scheduler_pb2.CancelRequest(request_id=request_id, reason=reason)
        await self.call.write(scheduler_pb2.ProxyMessage(cancel=cancel))
