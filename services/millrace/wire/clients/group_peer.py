"""The member's client of the PrefillGroup service at its SP group leaders."""

from __future__ import annotations

import grpc

from millrace.core.instance.group import GroupError, GroupMember, HandIn, JoinAsk
from millrace.wire.channel import Channels
from millrace.wire.codec.group import HAND_IN, JOIN, MEMBER
from millrace.wire.pb import gang_pb2_grpc

#: A member asks again after this time; the scheduler ends a wait that has no purpose any more.
WAIT_S = 20.0


class GroupLeaders:
    """Calls leaders by address; every leader has one channel, opened at the first call."""

    def __init__(self) -> None:
        self._channels = Channels()

    async def join(self, address: str, ask: JoinAsk) -> list[GroupMember]:
        """Returns the members once all have joined. Raises GroupError if they can't all join."""
        request = JOIN.encode(ask)
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
            return list(map(MEMBER.decode, reply.members))

    async def hand_in(self, address: str, hand_in: HandIn) -> None:
        """Sends a member's hand-in. Raises GroupError if the leader does not accept it."""
        try:
            reply = await self._stub(address).HandIn(HAND_IN.encode(hand_in), timeout=WAIT_S)
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
