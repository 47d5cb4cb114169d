"""Serves the scheduler's end of instances' streams, for a conductor in the scheduler's place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

import grpc

from millrace.core.scheduler.commands import Command
from millrace.core.scheduler.reports import Registration, Report
from millrace.wire.codec.instance import COMMANDS, REGISTRATION, REPORTS
from millrace.wire.pb import scheduler_pb2

WorkerContext = grpc.aio.ServicerContext[
    AsyncIterator[scheduler_pb2.WorkerMessage], AsyncIterator[scheduler_pb2.WorkerCommand]
]
StatusContext = grpc.aio.ServicerContext[
    scheduler_pb2.StatusRequest, Awaitable[scheduler_pb2.StatusReply]
]


class Fleet(Protocol):
    """The owner of the instances."""

    def joined(self, registration: Registration) -> asyncio.Queue[Command]:
        """Takes the registration of an instance; returns the queue of its commands."""

    def hear(self, instance_id: str, report: Report) -> None:
        """Takes a report of an instance."""

    def left(self, instance_id: str) -> None:
        """Notes that an instance's stream has ended."""


class ConductorServicer:
    """Serves the calls of instances to `Scheduler`: the stream, and the status with the peers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        connect = grpc.stream_stream_rpc_method_handler(
            self._connect_worker,
            request_deserializer=scheduler_pb2.WorkerMessage.FromString,
            response_serializer=scheduler_pb2.WorkerCommand.SerializeToString,
        )
        status = grpc.unary_unary_rpc_method_handler(
            self._get_status,
            request_deserializer=scheduler_pb2.StatusRequest.FromString,
            response_serializer=scheduler_pb2.StatusReply.SerializeToString,
        )
        handlers = {"ConnectWorker": connect, "GetStatus": status}
        generic = grpc.method_handlers_generic_handler("millrace.v1.Scheduler", handlers)
        server.add_generic_rpc_handlers((generic,))

    async def _get_status(
        self, request: scheduler_pb2.StatusRequest, context: StatusContext
    ) -> scheduler_pb2.StatusReply:
        """Names no instance to probe: the first passes show whether they reach each other."""
        return scheduler_pb2.StatusReply()

    async def _connect_worker(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage],
        context: WorkerContext,
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        registration = REGISTRATION.decode((await anext(request_iterator)).register)
        outbox = self._fleet.joined(registration)
        reading = asyncio.create_task(self._read(registration.incarnation.id, request_iterator))
        try:
            while True:
                yield COMMANDS.encode(await outbox.get())
        finally:
            reading.cancel()

    async def _read(
        self, instance_id: str, messages: AsyncIterator[scheduler_pb2.WorkerMessage]
    ) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in messages:
                if (report := REPORTS.decode(message)) is not None:
                    self._fleet.hear(instance_id, report)
        self._fleet.left(instance_id)
