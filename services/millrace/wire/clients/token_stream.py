"""A proxy's client of a decode instance's token stream."""

from __future__ import annotations

import asyncio
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
    address: str,
    *,
    proxy: Incarnation,
    decode: Incarnation,
    received: int | None = None,
    within_s: float | None = None,
) -> AsyncGenerator[TokenBatch]:
    """Subscribes `proxy` to the decode instance at `address`; yields each message.

    `received`: the events that the proxy has of earlier streams, if it has counted them. The
    instance sends what follows, as far as it has kept that; `TokenBatch.first` tells whether events
    are lost. An instance keeps events until a proxy asks for them.

    The stream waits while the instance can't be reached; with `within_s` it fails at once then, and
    if the first message takes longer. The caller closes the generator. Raises TokenStreamError.
    """
    in_time = within_s is not None
    async with open_channel(address, alone=in_time) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).StreamTokens(
            subscription(proxy, decode, received), wait_for_ready=not in_time
        )
        batches = aiter(call)
        try:
            async with asyncio.timeout(within_s):
                first = await anext(batches)
            yield batch_of(first)
            async for batch in batches:
                yield batch_of(batch)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TokenStreamError(f"no answer within {within_s:g} s") from None
        except MessageError as error:
            raise TokenStreamError(str(error)) from error
        except grpc.aio.AioRpcError as error:
            raise TokenStreamError(
                error.details() or str(error.code()),
                is_gone=error.code() == grpc.StatusCode.FAILED_PRECONDITION,
            ) from error
        finally:
            call.cancel()
