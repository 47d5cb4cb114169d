"""The prober's client of another instance's TransferProbe service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.probe import Examination, ProbeEndpoint
from millrace.wire.channel import open_channel
from millrace.wire.codec.incarnation import incarnation_message
from millrace.wire.codec.transfer import ENDPOINT, EXAMINATION
from millrace.wire.pb import transfer_pb2, transfer_pb2_grpc


class ProbeCall:
    """One probe of a peer. Every read raises TransferError if the stream fails or ends."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[transfer_pb2.ProbeRequest, transfer_pb2.ProbeReply],
        over: asyncio.Event,
    ) -> None:
        self._call = call
        self._over = over

    async def endpoint(self) -> ProbeEndpoint:
        """Returns the peer's endpoint, which is its first message."""
        return ENDPOINT.decode((await self._reply()).endpoint)

    async def verdict(self) -> None:
        """Reads the peer's verdict. Raises TransferError if the peer reports an error."""
        if error := (await self._reply()).result.error:
            raise TransferError(f"at the peer: {error}")

    async def end(self) -> None:
        """Ends the probe; returns once the peer has freed its endpoint."""
        self._over.set()
        await self._call.code()

    async def _reply(self) -> transfer_pb2.ProbeReply:
        try:
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            why = error.details() or "no reason given"
            raise TransferError(f"{error.code().name.lower()}: {why}") from error
        if isinstance(reply, transfer_pb2.ProbeReply):
            return reply
        raise TransferError("the peer ended the probe")


async def examine(
    address: str, instance_ids: Sequence[str] = (), *, timeout_s: float
) -> Examination:
    """Asks an instance about itself, and to probe others. Raises TransferError."""
    async with open_channel(address) as channel:
        stub = transfer_pb2_grpc.TransferProbeStub(channel)
        request = transfer_pb2.ExamineRequest(instance_ids=instance_ids)
        try:
            return EXAMINATION.decode(await stub.Examine(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            why = error.details() or "no reason given"
            raise TransferError(f"{error.code().name.lower()}: {why}") from error


@asynccontextmanager
async def probe_call(
    address: str, asker: Incarnation, endpoint: ProbeEndpoint, *, timeout_s: float
) -> AsyncIterator[ProbeCall]:
    """Asks the instance at `address` for a probe, and sends the endpoint that it writes to."""
    over = asyncio.Event()

    async def requests() -> AsyncIterator[transfer_pb2.ProbeRequest]:
        yield transfer_pb2.ProbeRequest(
            asker=incarnation_message(asker), endpoint=ENDPOINT.encode(endpoint)
        )
        await over.wait()

    async with open_channel(address) as channel:
        stub = transfer_pb2_grpc.TransferProbeStub(channel)
        try:
            yield ProbeCall(stub.Probe(requests(), timeout=timeout_s), over)
        finally:
            over.set()  # gRPC leaves the writer of a failed stream waiting
