"""Serves the TransferProbe gRPC service: answers probes, and examines for `millrace doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable

import grpc

from millrace.core.errors import TransferError
from millrace.core.kv.probe import Examination
from millrace.instance.transfer.kv_path import PROBE_TIMEOUT_S, KvPath, endpoint
from millrace.version import version
from millrace.wire.clients.scheduler_client import SchedulerUnavailable
from millrace.wire.codec.transfer import ENDPOINT, EXAMINATION
from millrace.wire.pb import transfer_pb2, transfer_pb2_grpc

ProbeContext = grpc.aio.ServicerContext[
    AsyncIterator[transfer_pb2.ProbeRequest], AsyncIterator[transfer_pb2.ProbeReply]
]


class ProbeServicer(transfer_pb2_grpc.TransferProbeServicer):
    """Translates messages; a call ends and frees its end when the asker ends the stream."""

    def __init__(self, path: KvPath, scheduler: str, device: str) -> None:
        """`scheduler`: where instances to examine are looked up; `device`: of the KV."""
        self._path = path
        self._scheduler = scheduler
        self._device = device

    def add_to(self, server: grpc.aio.Server) -> None:
        transfer_pb2_grpc.add_TransferProbeServicer_to_server(self, server)

    async def Probe(
        self, request_iterator: AsyncIterator[transfer_pb2.ProbeRequest], context: ProbeContext
    ) -> AsyncIterator[transfer_pb2.ProbeReply]:
        async with asyncio.timeout(PROBE_TIMEOUT_S), contextlib.AsyncExitStack() as stack:
            request = await anext(request_iterator)
            asker = request.asker.id
            try:
                end = await stack.enter_async_context(self._path.answering(asker))
            except TransferError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            yield transfer_pb2.ProbeReply(endpoint=ENDPOINT.encode(endpoint(end)))
            error_text = await self._path.answer(end, ENDPOINT.decode(request.endpoint), asker)
            yield transfer_pb2.ProbeReply(result=transfer_pb2.ProbeResult(error=error_text))
            async for _ in request_iterator:  # this end must live until the asker has checked
                pass

    async def Examine(
        self,
        request: transfer_pb2.ExamineRequest,
        context: grpc.aio.ServicerContext[
            transfer_pb2.ExamineRequest, Awaitable[transfer_pb2.Examination]
        ],
    ) -> transfer_pb2.Examination:
        unix_s = time.time()
        try:
            peers = await self._path.probe_all(self._scheduler, request.instance_ids)
        except SchedulerUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return EXAMINATION.encode(
            Examination(version=version(), unix_s=unix_s, device=self._device, peers=peers)
        )
