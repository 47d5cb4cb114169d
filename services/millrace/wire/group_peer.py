"""A member's client of its leaders' PrefillGroup service."""

from __future__ import annotations

import grpc

from millrace.core.instance.group import GroupError, GroupMember, HandIn, JoinAsk
from millrace.wire.channel import Channels
from millrace.wire.codec.group import hand_in_message, join_message, members_of
from millrace.wire.pb import gang_pb2_grpc

#: A member asks again after this; the scheduler ends a wait that has become pointless.
WAIT_S = 20.0


class GroupLeaders:
    """Leaders by address, one channel each, opened at the first call."""

    def __init__(self) -> None:
        self._channels = Channels()

    async def join(self, address: str, ask: JoinAsk) -> list[GroupMember]:
        """Returns when all have joined. Raises GroupError when they never will."""
        request = join_message(ask)
        while True:
            try:
                reply = await self._stub(address).Join(request, timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    continue
                raise _error("Join", address, error) from error
            if reply.refusal:
                raise GroupError(reply.refusal)
            return members_of(reply)

    async def hand_in(self, address: str, told: HandIn) -> None:
        """Raises GroupError when the leader does not take it."""
        try:
            reply = await self._stub(address).HandIn(hand_in_message(told), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise _error("HandIn", address, error) from error
        if reply.refusal:
            raise GroupError(reply.refusal)

    async def close(self) -> None:
        await self._channels.close()

    def _stub(self, address: str) -> gang_pb2_grpc.PrefillGroupStub:
        return gang_pb2_grpc.PrefillGroupStub(self._channels.to(address))


def _error(call: str, address: str, error: grpc.aio.AioRpcError) -> GroupError:
    return GroupError(f"{call} at {address}: {error.code().name.lower()}: {error.details()}")
