"""A stub scheduler and a stub decode instance, with which the bench measures a proxy: real gRPC, no
model.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

import grpc

from millrace.bench.gateway.stub_servicers import DecodeServicer, ProxyServicer
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import Member
from millrace.core.scheduler.events import CancelRequested
from millrace.core.token_events import TokenBatch, TokenEvent
from millrace.wire.codec.request_spec import decode_spec
from millrace.wire.fleet_messages import Fleet, Placed, ProxyMessage, ProxyUpdate, Submit
from millrace.wire.server import bind, create_server

M = TypeVar("M")


class Outbox(Generic[M]):
    """Queues the messages to one peer, also while the peer is not connected."""

    def __init__(self) -> None:
        self.waiting: list[M] = []
        #: Set while a message waits.
        self.ready = asyncio.Event()
        #: Set while no message waits: gRPC has taken all messages.
        self.taken = asyncio.Event()
        #: Messages taken so far.
        self.count = 0

    def put(self, *messages: M) -> None:
        self.waiting.extend(messages)
        self.ready.set()
        self.taken.clear()

    async def take(self) -> list[M]:
        """Returns all messages that wait, at least one."""
        await self.ready.wait()
        self.ready.clear()
        taken, self.waiting = self.waiting, []
        self.count += len(taken)
        self.taken.set()
        return taken


class StubFleet:
    """Calls `on_submit` for every submission and `on_cancel` for every cancellation.

    They answer with `place` and `emit`, at once or later. Used from one event loop.
    """

    def __init__(
        self,
        on_submit: Callable[[RequestSpec], None],
        on_cancel: Callable[[CancelRequested], None],
    ) -> None:
        self.on_submit = on_submit
        self.on_cancel = on_cancel
        self.decode = Incarnation("decode-0", 1)
        self.scheduler_port = 0
        self.decode_port = 0
        #: What waits for each proxy.
        self.updates: dict[str, Outbox[ProxyUpdate]] = defaultdict(Outbox)
        self.tokens: dict[str, Outbox[TokenEvent]] = defaultdict(Outbox)
        self.servers: dict[str, grpc.aio.Server] = {}

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
        self.scheduler_servicer().add_to(server)
        self.scheduler_port = bind(server, "127.0.0.1", self.scheduler_port)
        await server.start()
        self.servers["scheduler"] = server

    def scheduler_servicer(self) -> ProxyServicer:
        return ProxyServicer(self)  # type: ignore[abstract] # gRPC answers its other calls

    async def stop_scheduler(self) -> None:
        if (server := self.servers.pop("scheduler", None)) is not None:
            await server.stop(grace=None)
        self.updates.clear()

    async def start_decode(self) -> None:
        """Listens, on the port of its first start. Events wait while it does not."""
        server = create_server()
        DecodeServicer(self).add_to(server)
        self.decode_port = bind(server, "127.0.0.1", self.decode_port)
        await server.start()
        self.servers["decode"] = server

    async def stop_decode(self) -> None:
        if (server := self.servers.pop("decode", None)) is not None:
            await server.stop(grace=None)

    # -- messages of the fleet

    def fleet(self) -> Fleet:
        return Fleet(decode=(self.member,), ready=True)

    def place(self, spec: RequestSpec, predicted_ttft_s: float = 0.001) -> None:
        self.updates[spec.proxy.id].put(
            Placed(
                request_id=spec.request_id,
                decode=self.member,
                predicted_ttft_s=predicted_ttft_s,
            ),
        )

    def emit(self, proxy_id: str, events: Iterable[TokenEvent]) -> None:
        """Streams the events of one decode step."""
        self.tokens[proxy_id].put(*events)

    async def taken(self, proxy_id: str) -> None:
        """Returns when gRPC has taken all events: the proxy reads no faster than that."""
        await self.tokens[proxy_id].taken.wait()

    # -- streams

    async def serve_proxy(
        self, proxy: str, messages: AsyncIterator[ProxyMessage]
    ) -> AsyncIterator[ProxyUpdate]:
        outbox = self.updates[proxy]
        outbox.put(self.fleet())
        reader = asyncio.create_task(self._read(proxy, messages))
        try:
            while True:
                for update in await outbox.take():
                    yield update
        finally:
            reader.cancel()

    async def serve_tokens(self, proxy: str) -> AsyncIterator[TokenBatch]:
        outbox = self.tokens[proxy]
        yield TokenBatch(outbox.count, ())
        while True:
            events = await outbox.take()
            yield TokenBatch(outbox.count - len(events), events)

    async def _read(self, proxy: str, messages: AsyncIterator[ProxyMessage]) -> None:
        async for message in messages:
            self.hear(proxy, message)

    def hear(self, proxy: str, message: ProxyMessage) -> None:
        """Takes a message of a proxy; one of another kind needs no answer."""
        match message:
            case Submit():
                self.on_submit(decode_spec(message.spec))
            case CancelRequested():
                self.on_cancel(message)
