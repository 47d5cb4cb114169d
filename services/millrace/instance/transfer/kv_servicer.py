"""Serves the KvReceiver gRPC service: the control side of a ReceiveManager."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc

from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeQueued
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.wire.codec.token_events import FINISHED
from millrace.wire.codec.transfer import GRANT, HANDSHAKE, HISTORY, TICKET
from millrace.wire.pb import transfer_pb2, transfer_pb2_grpc

#: The deadline if the caller set none.
DEFAULT_WAIT_S = 30.0
#: Share of the caller's deadline that is reserved for sending the answer.
ANSWER_SHARE = 0.1


class KvReceiverServicer(transfer_pb2_grpc.KvReceiverServicer):
    """Translates messages, and keeps each call within its caller's deadline."""

    def __init__(self, manager: ReceiveManager) -> None:
        self._manager = manager

    def add_to(self, server: grpc.aio.Server) -> None:
        transfer_pb2_grpc.add_KvReceiverServicer_to_server(self, server)

    async def Handshake(
        self,
        request: transfer_pb2.HandshakeRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.HandshakeRequest, Awaitable[transfer_pb2.HandshakeReply]
        ],
    ) -> transfer_pb2.HandshakeReply:
        try:
            grant = await self._manager.handshake(HANDSHAKE.decode(request), _wait_s(context))
        except HandshakeQueued as queued:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(queued))
        except TransferError as error:
            return transfer_pb2.HandshakeReply(refusal=str(error))
        return transfer_pb2.HandshakeReply(grant=GRANT.encode(grant))

    async def FinishPrefill(
        self,
        request: transfer_pb2.FinishPrefillRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.FinishPrefillRequest, Awaitable[transfer_pb2.FinishPrefillReply]
        ],
    ) -> transfer_pb2.FinishPrefillReply:
        refusal = await self._manager.finish(
            TICKET.decode(request.ticket),
            total_chunks=request.finished.total_chunks,
            message=FINISHED.decode(request.finished),
            wait_s=_wait_s(context),
        )
        return transfer_pb2.FinishPrefillReply(refusal=refusal)

    async def AbortTransfer(
        self,
        request: transfer_pb2.AbortTransferRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.AbortTransferRequest, Awaitable[transfer_pb2.AbortTransferReply]
        ],
    ) -> transfer_pb2.AbortTransferReply:
        ticket = TICKET.decode(request.ticket)
        self._manager.abort(ticket, reason=request.reason, drained=request.drained)
        return transfer_pb2.AbortTransferReply()

    async def SendHistory(
        self,
        request: transfer_pb2.SendHistoryRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.SendHistoryRequest, Awaitable[transfer_pb2.SendHistoryReply]
        ],
    ) -> transfer_pb2.SendHistoryReply:
        try:
            await self._manager.send_history(HISTORY.decode(request), _wait_s(context))
        except TransferError as error:
            return transfer_pb2.SendHistoryReply(refusal=str(error))
        return transfer_pb2.SendHistoryReply()


def _wait_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    left_s = context.time_remaining()
    return DEFAULT_WAIT_S if left_s is None else max(0.0, left_s * (1 - ANSWER_SHARE))
