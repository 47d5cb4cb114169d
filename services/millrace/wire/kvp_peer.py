"""An owner's client of a holder's Kvp service: streams that last as long as what they stand for."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar, cast

import grpc

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.wire.channel import Channels
from millrace.wire.codec.kvp import attach_message, grant_of, hold_message
from millrace.wire.pb import kvp_pb2, kvp_pb2_grpc

Q = TypeVar("Q")
M = TypeVar("M")


class _News(Generic[Q, M]):
    """A stream that its reader ends. Cancelling a read ends it, too."""

    def __init__(self, name: str, address: str, call: grpc.aio.UnaryStreamCall[Q, M]) -> None:
        self._name = f"{name} at {address}"
        self._call = call

    async def first(self, timeout_s: float) -> M:
        """The first message. Raises TransferError as `next` does, and when it is late."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.next()
        except TimeoutError:
            raise TransferError(f"{self._name}: no answer within {timeout_s:g} s") from None

    async def next(self) -> M:
        """Raises TransferError when the stream has ended, whatever the reason."""
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
    """An owner's place at a holder, until `close`."""

    def __init__(
        self, grant: AttachGrant, news: _News[kvp_pb2.AttachRequest, kvp_pb2.AttachNews]
    ) -> None:
        self.grant = grant
        self._news = news

    async def lost(self) -> str:
        """Returns when the holder has let go of it, or is gone, and says why."""
        return await _end_of(self._news)

    def close(self) -> None:
        self._news.close()


class HeldShard:
    """A shard at a holder, until `close`. `number` names it in passes."""

    def __init__(
        self, number: int, address: str, news: _News[kvp_pb2.HoldRequest, kvp_pb2.HoldNews]
    ) -> None:
        self.number = number
        self._address = address
        self._news = news

    async def landed(self) -> None:
        """Returns once its part of the prompt is there. Raises TransferError when it is lost."""
        message = await self._news.next()
        if message.failed:
            raise TransferError(f"{self._address}: {message.failed}")

    async def lost(self) -> str:
        """After `landed`: returns when the holder has let go of it, or is gone, and says why."""
        try:
            await self.landed()
        except TransferError as error:
            return str(error)
        return f"{self._address} says twice that all has landed"

    def close(self) -> None:
        self._news.close()


class GrpcKvpPeer:
    """One holder."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub = kvp_pb2_grpc.KvpStub(channel)

    async def attach(self, ask: AttachAsk, *, timeout_s: float) -> Attachment:
        """Raises TransferError when it is refused or not answered in time."""
        news = _News("Attach", self._address, self._stub.Attach(attach_message(ask)))
        message = await news.first(timeout_s)
        if message.refusal:
            news.close()
            raise TransferError(f"{self._address} refused: {message.refusal}")
        return Attachment(grant_of(message), news)

    async def hold(self, ask: HoldAsk, *, timeout_s: float) -> HeldShard:
        """Raises TransferError when there is no room for it, or no answer in time."""
        news = _News("Hold", self._address, self._stub.Hold(hold_message(ask)))
        message = await news.first(timeout_s)
        if message.WhichOneof("kind") != "opened":
            news.close()
            raise TransferError(f"{self._address} refused: {message.failed or 'it gave no number'}")
        return HeldShard(message.opened.shard, self._address, news)


async def _end_of(news: _News[Q, M]) -> str:
    try:
        while True:
            await news.next()
    except TransferError as error:
        return str(error)


class KvpPeers:
    """Holders by address, a channel each, opened when first asked for."""

    def __init__(self) -> None:
        self._channels = Channels()

    def to(self, address: str) -> GrpcKvpPeer:
        """The holder at host:port."""
        return GrpcKvpPeer(address, self._channels.to(address))

    async def close(self) -> None:
        await self._channels.close()
