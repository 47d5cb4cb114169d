"""Serves the Decode gRPC service: streams of tokens and results to the proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from millrace.core.incarnation import Incarnation
from millrace.instance.tokens.streams import TokenStreams
from millrace.wire.codec.incarnation import incarnation_of
from millrace.wire.codec.token_events import batch_message
from millrace.wire.pb import decode_pb2, decode_pb2_grpc


class TokenServicer(decode_pb2_grpc.DecodeServicer):
    """Streams each proxy its outbox, one message for all ready events."""

    def __init__(self, streams: TokenStreams, incarnation: Incarnation) -> None:
        """`incarnation`: of this instance."""
        self._streams = streams
        self._incarnation = incarnation

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def StreamTokens(
        self,
        request: decode_pb2.TokenSubscription,
        context: grpc.aio.ServicerContext[
            decode_pb2.TokenSubscription, AsyncIterator[decode_pb2.TokenBatch]
        ],
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        if incarnation_of(request.decode) != self._incarnation:
            # A proxy that wants an earlier incarnation would take tokens and then drop them.
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this is {self._incarnation.id}, generation {self._incarnation.generation}",
            )
        received = request.received if request.HasField("received") else None
        stream = self._streams.subscribe(incarnation_of(request.proxy), received)
        async with aclosing(stream) as batches:
            async for batch in batches:
                yield batch_message(batch)
