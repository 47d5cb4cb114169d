"""Serves the Kvp gRPC service: the lease streams of KV owners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from millrace.core.errors import MillraceError
from millrace.instance.shards.shard_host import ShardHost
from millrace.wire.codec.kvp import GRANT, attach_of, hold_of
from millrace.wire.pb import kvp_pb2, kvp_pb2_grpc


class KvpServicer(kvp_pb2_grpc.KvpServicer):
    """Translates messages. When either side ends a stream, its attachment or shard ends, too."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def add_to(self, server: grpc.aio.Server) -> None:
        kvp_pb2_grpc.add_KvpServicer_to_server(self, server)

    async def Attach(
        self,
        request: kvp_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[
            kvp_pb2.AttachRequest, AsyncIterator[kvp_pb2.AttachReply]
        ],
    ) -> AsyncIterator[kvp_pb2.AttachReply]:
        try:
            ask = attach_of(request)
            grant = await self._host.attach(ask)
        except MillraceError as error:
            yield kvp_pb2.AttachReply(refusal=str(error))
            return
        try:
            yield kvp_pb2.AttachReply(grant=GRANT.encode(grant))
            await asyncio.get_running_loop().create_future()  # until the KV owner ends it
        finally:
            self._host.detach(ask.owner, grant.slot)

    async def Hold(
        self,
        request: kvp_pb2.HoldRequest,
        context: grpc.aio.ServicerContext[kvp_pb2.HoldRequest, AsyncIterator[kvp_pb2.HoldReply]],
    ) -> AsyncIterator[kvp_pb2.HoldReply]:
        try:
            shard = self._host.hold(hold_of(request))
        except MillraceError as error:
            yield kvp_pb2.HoldReply(failed=str(error))
            return
        try:
            yield kvp_pb2.HoldReply(opened=kvp_pb2.Opened(shard=shard.number))
            if await self._host.landed(shard):
                yield kvp_pb2.HoldReply(landed=kvp_pb2.Landed())
            yield kvp_pb2.HoldReply(failed=await asyncio.shield(shard.lost))
        finally:
            self._host.let_go(shard)
