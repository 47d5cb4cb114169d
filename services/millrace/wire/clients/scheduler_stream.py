"""An instance's stream to the scheduler: sends registration and reports, receives commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc

from millrace.core.errors import MillraceError
from millrace.core.scheduler.commands import Command
from millrace.core.scheduler.reports import Registration, Report
from millrace.wire.channel import open_channel
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.instance import COMMANDS, REPORTS, registration_message
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

#: The commands in order; commands of unknown kinds are left out.
SchedulerStream = AsyncIterator[Command]


class SchedulerStreamError(MillraceError):
    """The stream failed; the message holds the reason."""


@asynccontextmanager
async def scheduler_stream(
    address: str, registration: Registration, reports: AsyncIterator[Report]
) -> AsyncIterator[SchedulerStream]:
    """Opens the stream and sends `reports` until they end. Reading raises SchedulerStreamError."""

    async def messages() -> AsyncIterator[scheduler_pb2.WorkerMessage]:
        yield registration_message(registration)
        async for report in reports:
            yield REPORTS.encode(report)

    async with open_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).ConnectWorker(messages())
        commands = _commands(call)
        try:
            yield commands
        finally:
            call.cancel()
            await commands.aclose()


async def _commands(
    call: grpc.aio.StreamStreamCall[scheduler_pb2.WorkerMessage, scheduler_pb2.WorkerCommand],
) -> AsyncGenerator[Command]:
    try:
        async for message in call:
            if (command := COMMANDS.decode(message)) is not None:
                yield command
    except MessageError as error:
        raise SchedulerStreamError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise SchedulerStreamError(error.details() or str(error.code())) from error
