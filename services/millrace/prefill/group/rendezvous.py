"""How the members of a request's group find each other: the desk at its leader.

Every member joins with its pages and its transport; when all have, each gets to know them all. A
member waits for nobody while it holds a turn or a page that another may want first: the scheduler
has seen to the pages of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import grpc

from millrace.core.errors import TransferError
from millrace.prefill.job import PrefillJob
from millrace.wire.channel import Channels
from millrace.wire.pb import common_pb2, gang_pb2, gang_pb2_grpc

#: A member asks anew after this; the scheduler ends a wait that has become pointless.
WAIT_S = 20.0
#: Left of a caller's deadline for the answer's way back.
ANSWER_SHARE = 0.1

_Attempt = tuple[str, int]  # request, attempt


class GroupError(TransferError):
    """The members of a group can't come together. Another attempt may."""


@dataclass(slots=True, eq=False)
class _Table:
    """One attempt's members as far as they have come."""

    wanted: tuple[str, ...] | None = None  # known once the leader's own command has come
    joined: dict[str, gang_pb2.JoinRequest] = field(default_factory=dict)
    handed_in: dict[str, gang_pb2.HandInRequest] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    waiting: int = 0

    @property
    def complete(self) -> bool:
        return self.wanted is not None and all(one in self.joined for one in self.wanted)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Rendezvous(gang_pb2_grpc.PrefillGroupServicer):
    """Serves `PrefillGroup` at the leader. A table lives from an attempt's first word to `end`."""

    def __init__(self, life: common_pb2.Incarnation) -> None:
        self._life = life
        self._tables: dict[_Attempt, _Table] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        gang_pb2_grpc.add_PrefillGroupServicer_to_server(self, server)

    async def join(self, job: PrefillJob, own: gang_pb2.JoinRequest) -> list[gang_pb2.GroupMember]:
        """The leader's own way in. Raises GroupError for members that don't fit together."""
        table = self._table(job)
        table.wanted = job.members
        table.joined[job.instance_id] = own
        table.wake()
        while not table.complete:
            await table.changed.wait()
        return _roster(table)

    async def handed_in(self, job: PrefillJob) -> list[gang_pb2.HandInRequest]:
        """What the other members computed for the leader to report, once all have handed in."""
        table = self._table(job)
        while any(one not in table.handed_in for one in job.members[1:]):
            await table.changed.wait()
        return [table.handed_in[one] for one in job.members[1:]]

    def end(self, job: PrefillJob) -> None:
        """The leader's job is over: whoever still waits for its group is refused."""
        table = self._tables.pop((job.request_id, job.attempt), None)
        if table is not None:
            table.over = True
            table.wake()

    def check_idle(self) -> list[str]:
        """Requests whose tables are left although nobody waits at them."""
        return [r for (r, _), table in self._tables.items() if table.wanted and not table.waiting]

    # -- gRPC

    async def Join(
        self,
        request: gang_pb2.JoinRequest,
        context: grpc.aio.ServicerContext[gang_pb2.JoinRequest, Awaitable[gang_pb2.JoinReply]],
    ) -> gang_pb2.JoinReply:
        if request.leader != self._life:
            return gang_pb2.JoinReply(refusal=_stale(request.leader, self._life))
        key = (request.request_id, request.attempt)
        table = self._tables.setdefault(key, _Table())
        table.joined[request.member.incarnation.id] = request
        table.wake()
        left_s = context.time_remaining()
        table.waiting += 1
        try:
            async with asyncio.timeout(WAIT_S if left_s is None else left_s * (1 - ANSWER_SHARE)):
                while not (table.complete or table.over):
                    await table.changed.wait()
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not all have joined yet")
        finally:
            table.waiting -= 1
            if table.wanted is None and not table.waiting and self._tables.get(key) is table:
                del self._tables[key]  # the leader never heard of it
        if table.over and not table.complete:
            return gang_pb2.JoinReply(refusal=f"request {request.request_id} was given up")
        try:
            return gang_pb2.JoinReply(members=_roster(table))
        except GroupError as error:
            return gang_pb2.JoinReply(refusal=str(error))

    async def HandIn(
        self,
        request: gang_pb2.HandInRequest,
        context: grpc.aio.ServicerContext[gang_pb2.HandInRequest, Awaitable[gang_pb2.HandInReply]],
    ) -> gang_pb2.HandInReply:
        table = self._tables.get((request.request_id, request.attempt))
        if table is None or request.member.id not in table.joined:
            return gang_pb2.HandInReply(
                refusal=f"request {request.request_id}: {request.member.id} is of no group here"
            )
        table.handed_in[request.member.id] = request
        table.wake()
        return gang_pb2.HandInReply()

    def _table(self, job: PrefillJob) -> _Table:
        return self._tables.setdefault((job.request_id, job.attempt), _Table())


class LeaderClient:
    """A member's way to the leaders of its groups, a channel each."""

    def __init__(self) -> None:
        self._channels = Channels()

    async def join(self, address: str, own: gang_pb2.JoinRequest) -> list[gang_pb2.GroupMember]:
        """Returns when all have joined. Raises GroupError when they never will."""
        while True:
            try:
                reply = await self._stub(address).Join(own, timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    continue
                raise _error("Join", address, error) from error
            if reply.refusal:
                raise GroupError(reply.refusal)
            return list(reply.members)

    async def hand_in(self, address: str, request: gang_pb2.HandInRequest) -> None:
        """Raises GroupError when the leader does not take it."""
        try:
            reply = await self._stub(address).HandIn(request, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise _error("HandIn", address, error) from error
        if reply.refusal:
            raise GroupError(reply.refusal)

    async def close(self) -> None:
        await self._channels.close()

    def _stub(self, address: str) -> gang_pb2_grpc.PrefillGroupStub:
        return gang_pb2_grpc.PrefillGroupStub(self._channels.to(address))


def _roster(table: _Table) -> list[gang_pb2.GroupMember]:
    """All members in the order of the last group.

    Raises GroupError when they cut passes differently. That their pages are alike each sees to for
    itself (`RingManager.open`).
    """
    assert table.wanted is not None
    requests = [table.joined[one] for one in table.wanted]
    leader = requests[0]
    for request in requests[1:]:
        if request.max_chunk_tokens != leader.max_chunk_tokens:
            raise GroupError(
                f"request {leader.request_id}: engine.max_chunk_tokens of "
                f"{request.member.incarnation.id} is {request.max_chunk_tokens}, that of "
                f"{leader.member.incarnation.id} {leader.max_chunk_tokens}; the members of a "
                "group need the same"
            )
    return [request.member for request in requests]


def _stale(meant: common_pb2.Incarnation, actual: common_pb2.Incarnation) -> str:
    return (
        f"stale leader: the message is for {meant.id} (generation {meant.generation}), this is "
        f"{actual.id} (generation {actual.generation})"
    )


def _error(call: str, address: str, error: grpc.aio.AioRpcError) -> GroupError:
    return GroupError(f"{call} at {address}: {error.code().name.lower()}: {error.details()}")
