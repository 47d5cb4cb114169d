"""The proxy's ends of its streams: to the scheduler, and from decode instances."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from millrace.core.kv.transfer import Incarnation
from millrace.wire.channel import open_channel
from millrace.wire.codec import proxy as codec
from millrace.wire.codec.token_events import subscription, token_events
from millrace.wire.fleet_messages import ProxyMessage, ProxyUpdate
from millrace.wire.pb import decode_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from millrace.wire.token_events import TokenEvent


async def scheduler_updates(
    address: str, proxy: Incarnation, outgoing: AsyncIterator[Sequence[ProxyMessage]]
) -> AsyncGenerator[ProxyUpdate, None]:
    """Connects a proxy to the scheduler at `address`; yields the scheduler's updates.

    gRPC asks `outgoing` for the next items once all earlier items are written. The caller closes
    the generator. Raises grpc.aio.AioRpcError when the stream fails.
    """
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.ConnectProxy(_encoded(proxy, outgoing))
        try:
            async for message in call:
                if (update := codec.update_of(message, proxy_id=proxy.id)) is not None:
                    yield update
        finally:
            call.cancel()


async def _encoded(
    proxy: Incarnation, outgoing: AsyncIterator[Sequence[ProxyMessage]]
) -> AsyncIterator[scheduler_pb2.ProxyMessage]:
    yield codec.hello(proxy)
    async for items in outgoing:
        for message in codec.proxy_messages(items):
            yield message


async def token_batches(
    address: str, proxy: Incarnation, decode: Incarnation
) -> AsyncGenerator[list[TokenEvent], None]:
    """Subscribes a proxy to the decode instance at `address`; yields the events of each message.

    The stream waits while the instance can't be reached. No event is lost before the stream was up,
    because an instance keeps events until a proxy asks for them. The caller closes the generator.
    Raises grpc.aio.AioRpcError when the stream fails; FAILED_PRECONDITION means that another
    incarnation of the instance answers.
    """
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).StreamTokens(
            subscription(proxy, decode), wait_for_ready=True
        )
        try:
            async for batch in call:
                yield token_events(batch)
        finally:
            call.cancel()
