"""The Decode gRPC service: token streams to the proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from millrace.decode.token_streams import TokenStreams, life_of
from millrace.wire.pb import decode_pb2, decode_pb2_grpc


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Hands each proxy its outbox."""

    def __init__(self, streams: TokenStreams) -> None:
        self._streams = streams

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def StreamTokens(
        self,
        request: decode_pb2.TokenSubscription,
        context: grpc.aio.ServicerContext[
            decode_pb2.TokenSubscription, AsyncIterator[decode_pb2.TokenBatch]
        ],
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        async for batch in self._streams.subscribe(life_of(request.proxy)):
            yield batch
