"""A scheduler and a decode instance that only play their part: real gRPC, no model.

The gateway's bench measures a proxy against it, and the gateway's tests script it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc

from millrace.core.priority import POLICIES
from millrace.wire.codec import scheduler as codec
from millrace.wire.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from millrace.wire.server import bind, create_server

M = TypeVar("M")
Context = grpc.aio.ServicerContext[Any, Any]


class Outbox(Generic[M]):
    """Messages on their way to one peer; kept while it is not connected."""

    def __init__(self) -> None:
        self._waiting: list[M] = []
        self._ready = asyncio.Event()
        #: Nothing waits: what was put is with gRPC.
        self.taken = asyncio.Event()

    def put(self, *messages: M) -> None:
        self._waiting.extend(messages)
        self._ready.set()
        self.taken.clear()

    async def take(self) -> list[M]:
        """All that wait, at least one."""
        await self._ready.wait()
        self._ready.clear()
        taken, self._waiting = self._waiting, []
        self.taken.set()
        return taken


class StubFleet:
    """`on_submit` sees every submission, `on_cancel` every cancellation; they answer with the
    methods below, now or later. Used from one event loop."""

    def __init__(
        self,
        on_submit: Callable[[common_pb2.RequestSpec], None],
        on_cancel: Callable[[scheduler_pb2.CancelRequest], None] = lambda _: None,
    ) -> None:
        self.on_submit = on_submit
        self.on_cancel = on_cancel
        #: Announced at hello; change it with `announce`.
        self.ready = True
        self.policy = "fcfs"
        self.improvement_rate = 0.3
        self.parked_requests = 0  # as a proxy last said
        #: Answers to those who ask how far a prompt is, by the request's id.
        self.progress: dict[str, scheduler_pb2.Progress] = {}
        self.decode = common_pb2.Incarnation(id="decode-0", generation=1)
        self.scheduler_port = 0
        self.decode_port = 0
        self._updates: dict[str, Outbox[scheduler_pb2.ProxyUpdate]] = defaultdict(Outbox)
        self._tokens: dict[str, Outbox[decode_pb2.TokenEvent]] = defaultdict(Outbox)
        self._proxies: set[str] = set()
        self._servers: dict[str, grpc.aio.Server] = {}

    @property
    def scheduler_address(self) -> str:
        return f"127.0.0.1:{self.scheduler_port}"

    async def start(self) -> None:
        await self.start_decode()
        await self.start_scheduler()

    async def stop(self) -> None:
        await self.stop_scheduler()
        await self.stop_decode()

    async def start_scheduler(self) -> None:
        """Listens again on the port of its first start."""
        server = create_server()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(_Scheduler(self), server)
        self.scheduler_port = bind(server, "127.0.0.1", self.scheduler_port)
        await server.start()
        self._servers["scheduler"] = server

    async def stop_scheduler(self) -> None:
        if (server := self._servers.pop("scheduler", None)) is not None:
            await server.stop(grace=None)
        self._updates.clear()

    async def start_decode(self) -> None:
        """A new life of the decode instance, on the same port."""
        server = create_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), server)
        self.decode_port = bind(server, "127.0.0.1", self.decode_port)
        await server.start()
        self._servers["decode"] = server

    async def stop_decode(self) -> None:
        if (server := self._servers.pop("decode", None)) is not None:
            await server.stop(grace=None)
        self._tokens.clear()

    # -- what a fleet says

    def announce(self, *, ready: bool) -> None:
        """Tells every proxy whether the fleet is ready."""
        self.ready = ready
        for proxy in self._proxies:
            self._updates[proxy].put(self.fleet())

    def fleet(self) -> scheduler_pb2.ProxyUpdate:
        member = scheduler_pb2.Member(
            incarnation=self.decode, address=f"127.0.0.1:{self.decode_port}"
        )
        return scheduler_pb2.ProxyUpdate(
            fleet=scheduler_pb2.Fleet(decode=[member], prefill_count=1, ready=self.ready)
        )

    def place(self, spec: common_pb2.RequestSpec, predicted_ttft_s: float = 0.001) -> None:
        placed = scheduler_pb2.Placed(
            request_id=spec.request_id,
            decode=self.decode,
            decode_address=f"127.0.0.1:{self.decode_port}",
            predicted_ttft_s=predicted_ttft_s,
            lease_s=30.0,
        )
        self._updates[spec.proxy.id].put(scheduler_pb2.ProxyUpdate(placed=placed))

    def queue(self, spec: common_pb2.RequestSpec) -> None:
        """Says that a request has to wait for a place."""
        queued = scheduler_pb2.Queued(request_id=spec.request_id)
        self._updates[spec.proxy.id].put(scheduler_pb2.ProxyUpdate(queued=queued))

    def refuse(
        self, spec: common_pb2.RequestSpec, code: str, message: str, retry_after_s: float = 0.0
    ) -> None:
        refused = scheduler_pb2.Refused(
            request_id=spec.request_id, code=code, message=message, retry_after_s=retry_after_s
        )
        self._updates[spec.proxy.id].put(scheduler_pb2.ProxyUpdate(refused=refused))

    def fail(self, spec: common_pb2.RequestSpec, message: str, *, resumable: bool = False) -> None:
        failed = scheduler_pb2.Failed(
            request_id=spec.request_id, message=message, resumable=resumable
        )
        self._updates[spec.proxy.id].put(scheduler_pb2.ProxyUpdate(failed=failed))

    def emit(self, proxy_id: str, events: Iterable[decode_pb2.TokenEvent]) -> None:
        """Events of one decode step."""
        self._tokens[proxy_id].put(*events)

    async def taken(self, proxy_id: str) -> None:
        """Returns when gRPC has taken all that was emitted: slower than that it can't be read."""
        await self._tokens[proxy_id].taken.wait()

    # -- its streams

    async def serve_proxy(
        self, messages: AsyncIterator[scheduler_pb2.ProxyMessage]
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        proxy = (await anext(messages)).hello.id
        outbox = self._updates[proxy]
        self._proxies.add(proxy)
        outbox.put(self.fleet())
        reader = asyncio.create_task(self._read(messages, outbox))
        try:
            while True:
                for update in await outbox.take():
                    yield update
        finally:
            reader.cancel()
            self._proxies.discard(proxy)

    async def serve_tokens(self, proxy: str) -> AsyncIterator[decode_pb2.TokenBatch]:
        outbox = self._tokens[proxy]
        while True:
            yield decode_pb2.TokenBatch(events=await outbox.take())

    async def _read(
        self,
        messages: AsyncIterator[scheduler_pb2.ProxyMessage],
        outbox: Outbox[scheduler_pb2.ProxyUpdate],
    ) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "cancel":
                    self.on_cancel(message.cancel)
                case "load":
                    self.parked_requests = message.load.parked_requests
                case "ask":
                    known = [i for i in message.ask.request_ids if i in self.progress]
                    outbox.put(
                        *(scheduler_pb2.ProxyUpdate(progress=self.progress[i]) for i in known)
                    )
                case _:
                    for spec in message.submit.requests:
                        self.on_submit(spec)


class _Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self, fleet: StubFleet) -> None:
        self._fleet = fleet

    async def ConnectProxy(
        self, request_iterator: AsyncIterator[scheduler_pb2.ProxyMessage], context: Context
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        async for update in self._fleet.serve_proxy(request_iterator):
            yield update

    async def ConnectWorker(
        self, request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage], context: Context
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this fleet has no workers")
        yield scheduler_pb2.WorkerCommand()

    async def GetStatus(
        self, request: scheduler_pb2.StatusRequest, context: Context
    ) -> scheduler_pb2.StatusReply:
        return scheduler_pb2.StatusReply(
            policy=self._fleet.policy,
            preemption="none",
            planner="least_queue",
            policies=POLICIES,
            improvement_rate=self._fleet.improvement_rate,
        )

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: Context
    ) -> scheduler_pb2.SetPolicyReply:
        try:
            wanted = codec.policy_changed(request).policy
        except codec.MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before, self._fleet.policy = self._fleet.policy, wanted
        return scheduler_pb2.SetPolicyReply(before=before, now=wanted)

    async def SetImprovementRate(
        self, request: scheduler_pb2.SetImprovementRateRequest, context: Context
    ) -> scheduler_pb2.SetImprovementRateReply:
        try:
            wanted = codec.improvement_rate_changed(request)
        except codec.MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before = self._fleet.improvement_rate
        now = wanted.rows[0][1] if wanted.rate is None else wanted.rate
        self._fleet.improvement_rate = now
        return scheduler_pb2.SetImprovementRateReply(before=before, now=now)

    async def GetLoad(
        self, request: scheduler_pb2.LoadRequest, context: Context
    ) -> scheduler_pb2.LoadReply:
        return scheduler_pb2.LoadReply(parked_requests=self._fleet.parked_requests)

    async def SetCordon(
        self, request: scheduler_pb2.SetCordonRequest, context: Context
    ) -> scheduler_pb2.SetCordonReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")

    async def Evict(
        self, request: scheduler_pb2.EvictRequest, context: Context
    ) -> scheduler_pb2.EvictReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, fleet: StubFleet) -> None:
        self._fleet = fleet

    async def StreamTokens(
        self, request: decode_pb2.TokenSubscription, context: Context
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        if request.decode != self._fleet.decode:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another life")
        async for batch in self._fleet.serve_tokens(request.proxy.id):
            yield batch
