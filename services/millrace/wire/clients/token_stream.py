"""A proxy's client of a decode instance's token stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from millrace.core.errors import MillraceError
from millrace.core.incarnation import Incarnation
from millrace.core.token_events import TokenBatch
from millrace.wire.channel import open_channel
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.token_events import batch_of, subscription
from millrace.wire.pb import decode_pb2_grpc


class TokenStreamError(MillraceError):
    """The stream failed. `is_gone`: another incarnation of the decode instance answered."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


async def token_events(
    address: str, *, proxy: Incarnation, decode: Incarnation
) -> AsyncGenerator[TokenBatch]:
    """Subscribes `proxy` to the decode instance at `address`; yields each message.

    The stream waits while the instance can't be reached. An instance keeps events until a proxy
    asks for them. Events sent to a stream that breaks are lost, which `TokenBatch.first` of the
    next stream tells. The caller closes the generator. Raises TokenStreamError.
    """
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).StreamTokens(
            subscription(proxy, decode), wait_for_ready=True
        )
        try:
            async for batch in call:
                yield batch_of(batch)
        except MessageError as error:
            raise TokenStreamError(str(error)) from error
        except grpc.aio.AioRpcError as error:
            raise TokenStreamError(
                error.details() or str(error.code()),
                is_gone=error.code() == grpc.StatusCode.FAILED_PRECONDITION,
            ) from error
        finally:
            call.cancel()
