"""The gRPC services of the stub fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import TokenBatch
from millrace.wire.codec import proxy as proxy_codec
from millrace.wire.codec.incarnation import incarnation_of
from millrace.wire.codec.token_events import batch_message
from millrace.wire.fleet_messages import ProxyMessage, ProxyUpdate
from millrace.wire.pb import (
    decode_pb2,
    decode_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]


class Fleet(Protocol):
    """Plays the scheduler and the decode instance."""

    decode: Incarnation

    def serve_proxy(
        self, proxy: str, messages: AsyncIterator[ProxyMessage]
    ) -> AsyncIterator[ProxyUpdate]: ...

    def serve_tokens(self, proxy: str) -> AsyncIterator[TokenBatch]: ...


class ProxyServicer(scheduler_pb2_grpc.SchedulerServicer):
    """A scheduler for proxies alone: it does not implement its other calls."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def ConnectProxy(
        self, request_iterator: AsyncIterator[scheduler_pb2.ProxyMessage], context: Context
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        proxy = (await anext(request_iterator)).hello.id
        messages = _decoded(request_iterator)
        async for update in self._fleet.serve_proxy(proxy, messages):
            yield proxy_codec.update_message(update)


async def _decoded(
    messages: AsyncIterator[scheduler_pb2.ProxyMessage],
) -> AsyncIterator[ProxyMessage]:
    async for message in messages:
        for item in proxy_codec.items_of(message):
            yield item


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def StreamTokens(
        self, request: decode_pb2.TokenSubscription, context: Context
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        if incarnation_of(request.decode) != self._fleet.decode:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        async for batch in self._fleet.serve_tokens(request.proxy.id):
            yield batch_message(batch)
