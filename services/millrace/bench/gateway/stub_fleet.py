"""A stub scheduler and a stub decode instance: real gRPC, no model.

The gateway's bench measures a proxy with the stubs, and the gateway's tests script them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

import grpc

from millrace.bench.gateway.stub_servicers import DecodeServicer, SchedulerServicer
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import KeepTraces, Member
from millrace.core.scheduler.effects import Fail, Refuse, Suspect
from millrace.core.scheduler.events import CancelRequested
from millrace.core.token_events import TokenBatch, TokenEvent
from millrace.core.weights import DEFAULT_CLASS, DEFAULT_TENANT, Weights
from millrace.wire.codec.request_spec import decode_spec
from millrace.wire.fleet_messages import (
    AskProgress,
    Fleet,
    OpenRequest,
    Placed,
    Progress,
    ProxyLoad,
    ProxyMessage,
    ProxyUpdate,
    Queued,
    Submit,
)
from millrace.wire.server import bind, create_server

M = TypeVar("M")


class Outbox(Generic[M]):
    """Queues the messages to one peer, also while the peer is not connected."""

    def __init__(self) -> None:
        self._waiting: list[M] = []
        self._ready = asyncio.Event()
        #: Set while no message waits: gRPC has taken all messages.
        self.taken = asyncio.Event()
        #: Messages taken so far.
        self.count = 0

    def put(self, *messages: M) -> None:
        self._waiting.extend(messages)
        self._ready.set()
        self.taken.clear()

    def successor(self) -> Outbox[M]:
        """Moves what waits to another outbox, out of reach of those who still wait at this one."""
        other: Outbox[M] = Outbox()
        other.count = self.count
        other.put(*self.drop())
        return other

    def drop(self) -> list[M]:
        """Returns all messages that wait, as if they were sent to a peer that never read them."""
        dropped, self._waiting = self._waiting, []
        self._ready.clear()
        return dropped

    async def take(self) -> list[M]:
        """Returns all messages that wait, at least one."""
        await self._ready.wait()
        self._ready.clear()
        taken, self._waiting = self._waiting, []
        self.count += len(taken)
        self.taken.set()
        return taken


class StubFleet:
    """Calls `on_submit` for every submission and `on_cancel` for every cancellation.

    They answer with the methods below, at once or later. Used from one event loop.
    """

    def __init__(
        self,
        on_submit: Callable[[RequestSpec], None],
        on_cancel: Callable[[CancelRequested], None] = lambda _: None,
    ) -> None:
        self.on_submit = on_submit
        self.on_cancel = on_cancel
        #: Whether the fleet is ready; sent at hello. `announce` changes it.
        self.ready = True
        self.policy = "fcfs"
        self.weights = Weights(classes={DEFAULT_CLASS: 1.0}, tenants={DEFAULT_TENANT: 1.0})
        self.improvement_rate = 0.3
        self.parked_requests = 0  # in a proxy's last report
        #: What proxies named when they connected again, and whether the scheduler has lost it.
        self.reopened: list[OpenRequest] = []
        self.forgets = False
        self.kept_traces: list[str] = []  # that proxies have named
        #: Answers to proxies that ask for a prompt's progress, by the request's id.
        self.progress: dict[str, Progress] = {}
        self.decode = Incarnation("decode-0", 1)
        self.scheduler_port = 0
        self.decode_port = 0
        self._updates: dict[str, Outbox[ProxyUpdate]] = defaultdict(Outbox)
        self._tokens: dict[str, Outbox[TokenEvent]] = defaultdict(Outbox)
        self._proxies: set[str] = set()
        self._servers: dict[str, grpc.aio.Server] = {}

    @property
    def scheduler_address(self) -> str:
        return f"127.0.0.1:{self.scheduler_port}"

    @property
    def member(self) -> Member:
        """The decode instance and its address."""
        return Member(incarnation=self.decode, address=f"127.0.0.1:{self.decode_port}")

    async def start(self) -> None:
        await self.start_decode()
        await self.start_scheduler()

    async def stop(self) -> None:
        await self.stop_scheduler()
        await self.stop_decode()

    async def start_scheduler(self) -> None:
        """Listens again on the port of its first start."""
        server = create_server()
        SchedulerServicer(self).add_to(server)
        self.scheduler_port = bind(server, "127.0.0.1", self.scheduler_port)
        await server.start()
        self._servers["scheduler"] = server

    async def stop_scheduler(self) -> None:
        if (server := self._servers.pop("scheduler", None)) is not None:
            await server.stop(grace=None)
        self._updates.clear()

    async def start_decode(self) -> None:
        """Listens, on the port of its first start. Events wait while it does not."""
        server = create_server()
        DecodeServicer(self).add_to(server)
        self.decode_port = bind(server, "127.0.0.1", self.decode_port)
        await server.start()
        self._servers["decode"] = server

    async def stop_decode(self) -> None:
        for proxy, outbox in self._tokens.items():
            self._tokens[proxy] = outbox.successor()
        if (server := self._servers.pop("decode", None)) is not None:
            await server.stop(grace=None)

    # -- messages of the fleet

    def announce(self, *, ready: bool) -> None:
        """Tells every proxy whether the fleet is ready."""
        self.ready = ready
        for proxy in self._proxies:
            self._updates[proxy].put(self.fleet())

    def fleet(self) -> Fleet:
        return Fleet(decode=(self.member,), ready=self.ready)

    def place(self, spec: RequestSpec, predicted_ttft_s: float = 0.001) -> None:
        self._update(
            spec,
            Placed(
                request_id=spec.request_id,
                decode=self.member,
                predicted_ttft_s=predicted_ttft_s,
            ),
        )

    def queue(self, spec: RequestSpec) -> None:
        """Reports that a request waits for a decode instance."""
        self._update(spec, Queued(request_id=spec.request_id))

    def refuse(
        self, spec: RequestSpec, code: str, message: str, retry_after_s: float = 0.0
    ) -> None:
        self._update(
            spec,
            Refuse(
                request_id=spec.request_id,
                proxy_id=spec.proxy.id,
                code=code,
                message=message,
                retry_after_s=retry_after_s,
            ),
        )

    def fail(
        self,
        spec: RequestSpec,
        message: str,
        *,
        resumable: bool = False,
        prompt_unread: bool = False,
        quarantined: bool = False,
    ) -> None:
        self._update(
            spec,
            Fail(
                request_id=spec.request_id,
                proxy_id=spec.proxy.id,
                message=message,
                resumable=resumable,
                prompt_unread=prompt_unread,
                quarantined=quarantined,
            ),
        )

    def suspect(self, spec: RequestSpec, *deaths: Incarnation) -> None:
        """Reports the lost instances at which a request was open."""
        suspect = Suspect(request_id=spec.request_id, proxy_id=spec.proxy.id, deaths=deaths)
        self._update(spec, suspect)

    def _update(self, spec: RequestSpec, update: ProxyUpdate) -> None:
        self._updates[spec.proxy.id].put(update)

    def emit(self, proxy_id: str, events: Iterable[TokenEvent]) -> None:
        """Streams the events of one decode step."""
        self._tokens[proxy_id].put(*events)

    def lose(self, proxy_id: str) -> int:
        """Loses the events that wait, as a stream that breaks does; returns their number."""
        outbox = self._tokens[proxy_id]
        lost = len(outbox.drop())
        outbox.count += lost
        return lost

    async def taken(self, proxy_id: str) -> None:
        """Returns when gRPC has taken all events: the proxy reads no faster than that."""
        await self._tokens[proxy_id].taken.wait()

    # -- streams

    async def serve_proxy(
        self, proxy: str, messages: AsyncIterator[ProxyMessage]
    ) -> AsyncIterator[ProxyUpdate]:
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

    async def serve_tokens(self, proxy: str) -> AsyncIterator[TokenBatch]:
        outbox = self._tokens[proxy]
        yield TokenBatch(outbox.count, ())
        while True:
            events = await outbox.take()
            yield TokenBatch(outbox.count - len(events), events)

    def _reopened(self, message: OpenRequest) -> None:
        self.reopened.append(message)
        spec = decode_spec(message.request)
        if self.forgets and message.token_age_s is None:
            self.on_submit(spec)
        elif self.forgets:
            self.fail(spec, "no instance holds it", resumable=True)

    async def _read(
        self, messages: AsyncIterator[ProxyMessage], outbox: Outbox[ProxyUpdate]
    ) -> None:
        async for message in messages:
            match message:
                case CancelRequested():
                    self.on_cancel(message)
                case ProxyLoad():
                    self.parked_requests = message.parked_requests
                case AskProgress():
                    known = [i for i in message.request_ids if i in self.progress]
                    outbox.put(*(self.progress[request_id] for request_id in known))
                case KeepTraces():
                    self.kept_traces += message.trace_ids
                case Submit():
                    self.on_submit(decode_spec(message.spec))
                case OpenRequest():
                    self._reopened(message)
