"""The sender's client of a receiver's KvReceiver service."""

from __future__ import annotations

import grpc

from millrace.core.errors import TransferError
from millrace.core.kv.transfer import (
    HandshakeAsk,
    HandshakeGrant,
    HandshakeQueued,
    HandshakeRefused,
    HistoryAsk,
    Ticket,
)
from millrace.core.token_events import FinishedPrefill
from millrace.wire.channel import Channels
from millrace.wire.codec.token_events import FINISHED
from millrace.wire.codec.transfer import GRANT, HANDSHAKE, HISTORY, TICKET
from millrace.wire.pb import transfer_pb2, transfer_pb2_grpc


class GrpcKvPeer:
    """Calls one receiver. Every call has a deadline and may raise TransferError."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub = transfer_pb2_grpc.KvReceiverStub(channel)

    async def handshake(self, ask: HandshakeAsk, *, timeout_s: float) -> HandshakeGrant:
        """Asks for pages. Raises HandshakeRefused, HandshakeQueued; TransferError if unanswered."""
        try:
            reply = await self._stub.Handshake(HANDSHAKE.encode(ask), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise HandshakeQueued(error.details() or "queued") from error
            raise self._error("Handshake", error) from error
        if reply.refusal:
            raise HandshakeRefused(reply.refusal)
        return GRANT.decode(reply.grant)

    async def finish(self, ticket: Ticket, message: FinishedPrefill, *, timeout_s: float) -> None:
        """Reports a finished prefill. Raises TransferError if the receiver refuses."""
        request = transfer_pb2.FinishPrefillRequest(
            ticket=TICKET.encode(ticket), finished=FINISHED.encode(message)
        )
        try:
            reply = await self._stub.FinishPrefill(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error("FinishPrefill", error) from error
        if reply.refusal:
            raise TransferError(reply.refusal)

    async def abort(self, ticket: Ticket, *, reason: str, drained: bool, timeout_s: float) -> None:
        message = transfer_pb2.AbortTransferRequest(
            ticket=TICKET.encode(ticket), reason=reason, drained=drained
        )
        try:
            await self._stub.AbortTransfer(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error("AbortTransfer", error) from error

    async def send_history(self, ask: HistoryAsk, *, timeout_s: float) -> None:
        """Has the receiver send history. Raises HandshakeRefused; TransferError if unanswered."""
        try:
            reply = await self._stub.SendHistory(HISTORY.encode(ask), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error("SendHistory", error) from error
        if reply.refusal:
            raise HandshakeRefused(reply.refusal)

    def _error(self, call: str, error: grpc.aio.AioRpcError) -> TransferError:
        return TransferError(
            f"{call} at {self._address}: {error.code().name.lower()}: {error.details()}"
        )


class KvPeers:
    """Receivers by address; every receiver has one channel, opened at its first use."""

    def __init__(self) -> None:
        self._channels = Channels()

    def to(self, address: str) -> GrpcKvPeer:
        """Returns the receiver at host:port."""
        return GrpcKvPeer(address, self._channels.to(address))

    async def close(self) -> None:
        await self._channels.close()
