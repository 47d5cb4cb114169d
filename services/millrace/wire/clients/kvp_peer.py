"""The KV owner's client of a KVP worker's service; every stream holds an attachment or a shard."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar, cast

import grpc

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.wire.channel import Channels
from millrace.wire.codec.kvp import ATTACH, GRANT, HOLD
from millrace.wire.pb import kvp_pb2, kvp_pb2_grpc

Q = TypeVar("Q")
M = TypeVar("M")


class _Reports(Generic[Q, M]):
    """A stream of messages that its reader ends. Cancelling a read ends the stream, too."""

    def __init__(self, name: str, address: str, call: grpc.aio.UnaryStreamCall[Q, M]) -> None:
        self._name = f"{name} at {address}"
        self._call = call

    async def first(self, timeout_s: float) -> M:
        """Returns the first message. Raises TransferError as `next` does, and after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.next()
        except TimeoutError:
            raise TransferError(f"{self._name}: no answer within {timeout_s:g} s") from None

    async def next(self) -> M:
        """Returns the next message. Raises TransferError if the stream has ended or failed."""
        try:
            message = await self._call.read()
            if message is not grpc.aio.EOF:  # type: ignore[attr-defined] # stubs lack it
                return cast(M, message)
            code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            why = error.details() or "no reason given"
            raise TransferError(f"{self._name}: {error.code().name.lower()}: {why}") from error
        raise TransferError(f"{self._name}: the stream has ended ({code.name.lower()})")

    def close(self) -> None:
        self._call.cancel()


class Attachment:
    """A KV owner's attachment to a KVP worker, until `close`."""

    def __init__(
        self, grant: AttachGrant, reports: _Reports[kvp_pb2.AttachRequest, kvp_pb2.AttachReply]
    ) -> None:
        self.grant = grant
        self._reports = reports

    async def lost(self) -> str:
        """Waits until the KVP worker is gone or has ended the attachment; returns the reason."""
        return await _end_of(self._reports)

    def close(self) -> None:
        self._reports.close()


class HeldShard:
    """A shard at a KVP worker, until `close`. Decode passes name it by `number`."""

    def __init__(
        self, number: int, address: str, reports: _Reports[kvp_pb2.HoldRequest, kvp_pb2.HoldReply]
    ) -> None:
        self.number = number
        self._address = address
        self._reports = reports

    async def landed(self) -> None:
        """Returns once the shard's tokens are stored. Raises TransferError if the shard is lost."""
        message = await self._reports.next()
        if message.failed:
            raise TransferError(f"{self._address}: {message.failed}")

    async def lost(self) -> str:
        """Waits, after `landed`, until the shard is lost; returns the reason."""
        try:
            await self.landed()
        except TransferError as error:
            return str(error)
        return f"{self._address} reported twice that the shard has landed"

    def close(self) -> None:
        self._reports.close()


class GrpcKvpPeer:
    """Calls one KVP worker."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub = kvp_pb2_grpc.KvpStub(channel)

    async def attach(self, ask: AttachAsk, *, timeout_s: float) -> Attachment:
        """Attaches the owner. Raises TransferError after a refusal or `timeout_s`."""
        reports = _Reports("Attach", self._address, self._stub.Attach(ATTACH.encode(ask)))
        message = await reports.first(timeout_s)
        if message.refusal:
            reports.close()
            raise TransferError(f"{self._address} refused: {message.refusal}")
        return Attachment(GRANT.decode(message.grant), reports)

    async def hold(self, ask: HoldAsk, *, timeout_s: float) -> HeldShard:
        """Asks for a shard. Raises TransferError if there is no room, or no answer in time."""
        reports = _Reports("Hold", self._address, self._stub.Hold(HOLD.encode(ask)))
        message = await reports.first(timeout_s)
        if message.WhichOneof("kind") != "opened":
            reports.close()
            raise TransferError(f"{self._address} refused: {message.failed or 'it gave no number'}")
        return HeldShard(message.opened.shard, self._address, reports)


async def _end_of(reports: _Reports[Q, M]) -> str:
    try:
        while True:
            await reports.next()
    except TransferError as error:
        return str(error)


class KvpPeers:
    """KVP workers by address; every worker has one channel, opened at its first use."""

    def __init__(self) -> None:
        self._channels = Channels()

    def to(self, address: str) -> GrpcKvpPeer:
        """Returns the KVP worker at host:port."""
        return GrpcKvpPeer(address, self._channels.to(address))

    async def close(self) -> None:
        await self._channels.close()
