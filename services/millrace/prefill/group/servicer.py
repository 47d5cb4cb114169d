"""Serves the PrefillGroup gRPC service: members of SP groups call their leader."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc

from millrace.core.errors import TransferError
from millrace.prefill.group.rendezvous import Rendezvous
from millrace.wire.clients.group_peer import WAIT_S
from millrace.wire.codec.group import HAND_IN, JOIN, MEMBER
from millrace.wire.pb import gang_pb2, gang_pb2_grpc

#: Share of a caller's deadline that is reserved for sending the answer.
ANSWER_SHARE = 0.1


class PrefillGroupServicer(gang_pb2_grpc.PrefillGroupServicer):
    """Translates messages, and keeps each call within its caller's deadline."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def add_to(self, server: grpc.aio.Server) -> None:
        gang_pb2_grpc.add_PrefillGroupServicer_to_server(self, server)

    async def Join(
        self,
        request: gang_pb2.JoinRequest,
        context: grpc.aio.ServicerContext[gang_pb2.JoinRequest, Awaitable[gang_pb2.JoinReply]],
    ) -> gang_pb2.JoinReply:
        left_s = context.time_remaining()
        wait_s = WAIT_S if left_s is None else left_s * (1 - ANSWER_SHARE)
        try:
            members = await self._rendezvous.join_member(JOIN.decode(request), wait_s)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not all have joined yet")
        except TransferError as error:
            return gang_pb2.JoinReply(refusal=str(error))
        return gang_pb2.JoinReply(members=map(MEMBER.encode, members))

    async def HandIn(
        self,
        request: gang_pb2.HandInRequest,
        context: grpc.aio.ServicerContext[gang_pb2.HandInRequest, Awaitable[gang_pb2.HandInReply]],
    ) -> gang_pb2.HandInReply:
        try:
            self._rendezvous.take(HAND_IN.decode(request))
        except TransferError as error:
            return gang_pb2.HandInReply(refusal=str(error))
        return gang_pb2.HandInReply()
