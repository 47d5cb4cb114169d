"""A proxy's stream to the scheduler: requests go out, placements come in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc

from millrace.core.incarnation import Incarnation
from millrace.core.instance.fence import EpochFence
from millrace.wire.channel import open_channel
from millrace.wire.clients.scheduler_stream import SchedulerStreamError, stale
from millrace.wire.codec import proxy as codec
from millrace.wire.fleet_messages import ProxyMessage, ProxyUpdate
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc


async def scheduler_updates(
    address: str,
    proxy: Incarnation,
    outgoing: AsyncIterator[Sequence[ProxyMessage]],
    fence: EpochFence,
) -> AsyncGenerator[ProxyUpdate, None]:
    """Connects a proxy to the scheduler at `address`; yields the scheduler's updates.

    gRPC asks `outgoing` for the next items once all earlier items are written. The caller closes
    the generator. Raises SchedulerStreamError when the stream fails, and for an update of a
    scheduler that does not lead any more.
    """
    async with open_channel(address, alone=True) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.ConnectProxy(_encoded(proxy, outgoing, fence.epoch))
        try:
            async for message in call:
                if not fence.admits(message.epoch):
                    raise SchedulerStreamError(stale(message.epoch, fence))
                if (update := codec.update_of(message, proxy_id=proxy.id)) is not None:
                    yield update
        except grpc.aio.AioRpcError as error:
            raise SchedulerStreamError.of(error) from error
        finally:
            call.cancel()


async def _encoded(
    proxy: Incarnation, outgoing: AsyncIterator[Sequence[ProxyMessage]], seen_epoch: int
) -> AsyncIterator[scheduler_pb2.ProxyMessage]:
    yield codec.hello(proxy, seen_epoch)
    async for items in outgoing:
        for message in codec.proxy_messages(items):
            yield message
