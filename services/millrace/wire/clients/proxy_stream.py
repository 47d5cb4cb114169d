"""A proxy's stream to the scheduler: requests go out, placements come in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from millrace.core.kv.transfer import Incarnation
from millrace.wire.channel import open_channel
from millrace.wire.codec import proxy as codec
from millrace.wire.fleet_messages import ProxyMessage, ProxyUpdate
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc


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
