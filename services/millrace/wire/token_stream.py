"""A proxy's client of a decode instance's token stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from millrace.core.errors import MillraceError
from millrace.core.kv.transfer import Incarnation
from millrace.core.token_events import TokenEvent
from millrace.wire.channel import open_channel
from millrace.wire.codec.incarnation import incarnation_message
from millrace.wire.codec.tokens import events_of
from millrace.wire.pb import decode_pb2, decode_pb2_grpc


class TokenStreamError(MillraceError):
    """The stream failed; the message holds gRPC's code and details."""


async def token_events(
    address: str, *, proxy: Incarnation, decode: Incarnation
) -> AsyncGenerator[list[TokenEvent]]:
    """Yields the events for `proxy` until the stream ends, each time all events that are ready.

    Raises TokenStreamError.
    """
    subscription = decode_pb2.TokenSubscription(
        proxy=incarnation_message(proxy), decode=incarnation_message(decode)
    )
    async with open_channel(address) as channel:
        try:
            async for batch in decode_pb2_grpc.DecodeStub(channel).StreamTokens(subscription):
                yield events_of(batch)
        except grpc.aio.AioRpcError as error:
            raise TokenStreamError(
                f"tokens of {address}: {error.code().name.lower()}: {error.details()}"
            ) from error
