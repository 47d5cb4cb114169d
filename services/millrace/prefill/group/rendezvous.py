"""Brings the members of a request's SP group together at the group's leader.

Every member joins with its pages and its transport; when all have joined, each gets the list of all
members. A waiting member cannot cause a deadlock: it holds no prepare turn, and the scheduler has
made sure that all members have their pages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from millrace.core.incarnation import Incarnation
from millrace.core.instance.group import GroupError, GroupMember, HandIn, JoinAsk
from millrace.prefill.job import PrefillJob

_Attempt = tuple[str, int]  # request, attempt


@dataclass(slots=True, eq=False)
class _Table:
    """The members of one attempt that have joined so far."""

    wanted: tuple[str, ...] | None = None  # set when the leader has its command
    joined: dict[str, JoinAsk] = field(default_factory=dict)
    handed_in: dict[str, HandIn] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    waiting: int = 0

    @property
    def complete(self) -> bool:
        return self.wanted is not None and all(one in self.joined for one in self.wanted)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Rendezvous:
    """The meeting point at the leader. A table exists from an attempt's first message to `end`."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._tables: dict[_Attempt, _Table] = {}

    async def join(self, job: PrefillJob, own: JoinAsk) -> list[GroupMember]:
        """Joins as the leader; returns all members. Raises GroupError for members that differ."""
        table = self._table(job)
        table.wanted = job.members
        table.joined[job.instance_id] = own
        table.wake()
        while not table.complete:
            await table.changed.wait()
        return _roster(table)

    async def handed_in(self, job: PrefillJob) -> list[HandIn]:
        """Waits for the results of all other members, and returns them."""
        table = self._table(job)
        while any(one not in table.handed_in for one in job.members[1:]):
            await table.changed.wait()
        return [table.handed_in[one] for one in job.members[1:]]

    def end(self, job: PrefillJob) -> None:
        """Ends the leader's job: members that still wait for the group are refused."""
        table = self._tables.pop((job.request_id, job.attempt), None)
        if table is not None:
            table.over = True
            table.wake()

    def check_idle(self) -> list[str]:
        """Lists the requests whose tables are left although no member waits."""
        return [r for (r, _), table in self._tables.items() if table.wanted and not table.waiting]

    # -- the other members, through the servicer

    async def join_member(self, ask: JoinAsk, wait_s: float) -> list[GroupMember]:
        """Joins as a member; returns all members when all have joined.

        Raises GroupError when the attempt ends first, TimeoutError after `wait_s` seconds.
        """
        if ask.leader != self._incarnation:
            raise GroupError(_stale(ask.leader, self._incarnation))
        key = (ask.request_id, ask.attempt)
        table = self._tables.setdefault(key, _Table())
        table.joined[ask.member.incarnation.id] = ask
        table.wake()
        table.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                while not (table.complete or table.over):
                    await table.changed.wait()
        finally:
            table.waiting -= 1
            if table.wanted is None and not table.waiting and self._tables.get(key) is table:
                del self._tables[key]  # the leader has no such attempt
        if table.over and not table.complete:
            raise GroupError(f"request {ask.request_id} was given up")
        return _roster(table)

    def take(self, hand_in: HandIn) -> None:
        """Takes a member's result. Raises GroupError if the member is in no group here."""
        table = self._tables.get((hand_in.request_id, hand_in.attempt))
        if table is None or hand_in.member.id not in table.joined:
            raise GroupError(
                f"request {hand_in.request_id}: {hand_in.member.id} is of no group here"
            )
        table.handed_in[hand_in.member.id] = hand_in
        table.wake()

    def _table(self, job: PrefillJob) -> _Table:
        return self._tables.setdefault((job.request_id, job.attempt), _Table())


def _roster(table: _Table) -> list[GroupMember]:
    """Lists all members in the order of the last group.

    Raises GroupError when they cut passes differently. Each member itself checks that the pages
    have one layout (`RingManager.open`).
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


def _stale(meant: Incarnation, actual: Incarnation) -> str:
    return f"stale leader: the message is for {meant}, this is {actual}"
