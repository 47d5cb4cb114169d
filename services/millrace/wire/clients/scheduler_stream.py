"""An instance's stream to the scheduler: sends registration and reports, receives commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, cast

import grpc

from millrace.core.errors import MillraceError
from millrace.core.instance.fence import EpochFence
from millrace.core.scheduler.commands import Command
from millrace.core.scheduler.reports import Registration, Report
from millrace.wire.channel import open_channel
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.instance import COMMANDS, REPORTS, registration_message
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

#: The trailing metadata in which a scheduler that stands by names the leader's address.
LEADER: Final = "millrace-leader"

#: The commands in order; commands of unknown kinds are left out.
SchedulerStream = AsyncIterator[Command]


class SchedulerStreamError(MillraceError):
    """The stream failed; the message holds the reason.

    `leader`: the address of the leader, if the scheduler stands by and knows it.
    """

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader

    @staticmethod
    def of(error: grpc.aio.AioRpcError) -> SchedulerStreamError:
        """Returns the error of a stream that gRPC has ended."""
        return SchedulerStreamError(error.details() or str(error.code()), leader_in(error))


def leader_in(error: grpc.aio.AioRpcError) -> str:
    """Returns the leader that a scheduler which stands by has named; empty: none."""
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    leader = dict(metadata).get(LEADER, "")
    return leader if isinstance(leader, str) else ""


@asynccontextmanager
async def scheduler_stream(
    address: str, registration: Registration, reports: AsyncIterator[Report], fence: EpochFence
) -> AsyncIterator[SchedulerStream]:
    """Opens the stream and sends `reports` until they end. Reading raises SchedulerStreamError,
    also for a command of a scheduler that does not lead any more.
    """

    async def messages() -> AsyncIterator[scheduler_pb2.WorkerMessage]:
        yield registration_message(registration, fence.epoch)
        async for report in reports:
            yield REPORTS.encode(report)

    async with open_channel(address, alone=True) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).ConnectWorker(messages())
        commands = _commands(call, fence)
        try:
            yield commands
        finally:
            call.cancel()
            await commands.aclose()


def stale(epoch: int, fence: EpochFence) -> str:
    """Says that a message was refused."""
    return f"it does not lead any more: its epoch is {epoch}, the leader's is {fence.epoch}"


async def _commands(
    call: grpc.aio.StreamStreamCall[scheduler_pb2.WorkerMessage, scheduler_pb2.WorkerCommand],
    fence: EpochFence,
) -> AsyncGenerator[Command]:
    try:
        async for message in call:
            if not fence.admits(message.epoch):
                raise SchedulerStreamError(stale(message.epoch, fence))
            if (command := COMMANDS.decode(message)) is not None:
                yield command
    except MessageError as error:
        raise SchedulerStreamError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise SchedulerStreamError.of(error) from error
