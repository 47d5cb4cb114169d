"""Connects this instance to the other members of its SP groups: joining, links, messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import grpc

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.instance import gang
from millrace.core.instance.group import (
    GroupError,
    GroupMember,
    HandIn,
    JoinAsk,
)
from millrace.core.kv.transfer import HistoryAsk, Ticket
from millrace.core.scheduler.commands import Member
from millrace.core.token_events import PositionLogprobs
from millrace.instance.role import WorkerContext
from millrace.instance.transfer.transports import transport_name
from millrace.prefill.group.rendezvous import Rendezvous
from millrace.prefill.group.servicer import PrefillGroupServicer
from millrace.prefill.job import PrefillJob
from millrace.transfer.ring.manager import PeerInfo, RingManager
from millrace.transfer.transport.base import outcome
from millrace.wire.clients.group_peer import GroupLeaders
from millrace.wire.clients.kv_peer import KvPeers

HISTORY_TIMEOUT_S = 30.0


class Membership:
    """The groups of one prefill instance. For the event loop; any thread may call `say`."""

    def __init__(
        self,
        context: WorkerContext,
        peers: KvPeers,
        region: int,
        on_broken: Callable[[str, int, GroupError], None],
    ) -> None:
        """`region`: the transport's number of the KV pool. `on_broken` is called on the event loop
        when the group of a request's attempt fails.
        """
        self._on_broken = on_broken
        self._context = context
        self._layout = context.engine.layout
        self._incarnation = context.incarnation
        self._transport = context.transport
        self._peers = peers
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._rendezvous = Rendezvous(context.incarnation)
        self._leaders = GroupLeaders()
        self._ring = RingManager(context.transport, self._layout, region, context.config.transfer)
        self._names: dict[str, str] = {}  # instance -> transport of its latest incarnation
        self._instances: dict[str, str] = {}

    def attach(self, server: grpc.aio.Server) -> None:
        PrefillGroupServicer(self._rendezvous).add_to(server)

    # -- joining

    async def meet(self, job: PrefillJob) -> None:
        """Joins the job's group and links to its members. Raises TransferError on failure."""
        assert job.layout is not None  # jobs with a group have a layout
        members = await self._join(job)
        infos: dict[str, PeerInfo] = {}
        for member in members:
            info = await self._info(member)
            infos[info.instance_id] = info
        me = infos.pop(job.instance_id)

        def broke(reason: str) -> None:
            self._break(job.request_id, job.attempt, reason)

        job.link = self._ring.open(job.request_id, job.attempt, me, infos, broke)
        for shares in job.layout.chunks:
            job.link.exchange(shares)
        if job.layout.fetched.get(job.instance_id):
            await self._fetch(job)

    async def _join(self, job: PrefillJob) -> Sequence[GroupMember]:
        leader = None if job.leads else _leader(job)
        own = JoinAsk(
            request_id=job.request_id,
            attempt=job.attempt,
            leader=self._incarnation if leader is None else leader.incarnation,
            member=GroupMember(
                incarnation=self._incarnation,
                layout=self._layout,
                pages=tuple(job.pages),
                buffer_pages=tuple(job.buffers),
                agent_metadata=self._transport.metadata(),
            ),
            max_chunk_tokens=self._context.config.engine.max_chunk_tokens,
        )
        if leader is None:
            return await self._rendezvous.join(job, own)
        return await self._leaders.join(leader.address, own)

    async def _info(self, member: GroupMember) -> PeerInfo:
        """Connects the transport to the member; returns the member's data for the ring."""
        incarnation, peer = member.incarnation, self._transport.name
        if incarnation != self._incarnation:
            peer = await outcome(self._transport.connect(member.agent_metadata))
            self._instances.pop(self._names.get(incarnation.id, ""), None)
            self._names[incarnation.id] = peer
            self._instances[peer] = incarnation.id
        return PeerInfo(
            instance_id=incarnation.id,
            generation=incarnation.generation,
            peer=peer,
            region=self._region,
            pages=member.pages,
            buffer_pages=member.buffer_pages,
            layout=member.layout,
        )

    async def _fetch(self, job: PrefillJob) -> None:
        """Asks decode to write back the KV that an earlier attempt left there, layer by layer."""
        assert job.layout is not None and job.link is not None and job.session is not None
        decode = job.command.decode
        assert decode is not None  # it keeps the fetched KV
        await job.session.opened()  # then decode can be asked whether it still writes
        runs = job.layout.fetched[job.instance_id]
        job.link.fetched(transport_name(decode.incarnation))
        ask = HistoryAsk(
            ticket=Ticket(
                request_id=job.request_id,
                sender=self._incarnation,
                receiver=decode.incarnation,
                attempt=job.attempt,
            ),
            layout=self._layout,
            pages=job.pages,
            runs=runs,
            agent_metadata=self._transport.metadata(),
            region=self._region,
        )
        await self._peers.to(decode.address).send_history(ask, timeout_s=HISTORY_TIMEOUT_S)

    # -- results for the leader's report

    async def collect(self, job: PrefillJob) -> tuple[PositionLogprobs | None, ...]:
        """Collects the prompt's log-probabilities of all members; none if not requested.

        Adds the members' hidden states to the job's own, if requested.
        """
        if not job.needs_whole_prompt:
            return ()
        runs = list(job.prompt_logprobs)
        if len(job.members) > 1:
            for handed_in in await self._rendezvous.handed_in(job):
                runs += handed_in.logprobs
                job.hidden_pool.take(handed_in.hidden_sum)
        if job.sampling.prompt_logprobs < 0:
            return ()
        runs.sort(key=lambda run: run.start_token)
        return (None, *(one for run in runs for one in run.positions))

    async def hand_in(self, job: PrefillJob) -> None:
        """Sends this member's log-probabilities and hidden states to the leader, if requested."""
        if not job.needs_whole_prompt:
            return
        hand_in = HandIn(
            request_id=job.request_id,
            attempt=job.attempt,
            member=self._incarnation,
            logprobs=tuple(job.prompt_logprobs),
            hidden_sum=job.hidden_pool.hand_in(),
        )
        await self._leaders.hand_in(_leader(job).address, hand_in)

    # -- the messages of gangs

    def say(self, instance_id: str, payload: bytes) -> None:
        """Sends a gang's message to a member, from any thread. Members wait for each other's
        messages, so a failed message breaks the group.
        """
        sent = self._transport.notify(self._names[instance_id], payload)
        sent.add_done_callback(partial(self._sent, instance_id, payload))

    def _sent(self, instance_id: str, payload: bytes, sent: Future[None]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            key = gang.Message.decode(payload).key
            self._break(key.request_id, key.attempt, f"a message to {instance_id}: {error}")

    def _break(self, request_id: str, attempt: int, reason: str) -> None:
        """Breaks the group of a request's attempt; called on any thread."""
        error = GroupError(f"request {request_id}: {reason}")
        with suppress(RuntimeError):  # the loop has ended, and with it the instance
            self._loop.call_soon_threadsafe(self._on_broken, request_id, attempt, error)

    def listen(self, receive: Callable[[str, bytes], None]) -> None:
        """Subscribes `receive`: it gets (instance, message) on the transport's thread."""
        self._transport.subscribe(gang.CHANNEL, partial(self._hear, receive))

    def _hear(self, receive: Callable[[str, bytes], None], peer: str, payload: bytes) -> None:
        if (instance_id := self._instances.get(peer)) is not None:
            receive(instance_id, payload)

    # -- the end

    def end(self, job: PrefillJob) -> None:
        """Ends the group of a job that this instance leads."""
        if job.leads:
            self._rendezvous.end(job)

    def check_integrity(self) -> None:
        """Raises IntegrityError when the idle instance holds state of a group."""
        self._ring.check_integrity()
        if tables := self._rendezvous.check_idle():
            raise IntegrityError(f"groups are left that nobody needs: {sorted(tables)}")

    async def close(self) -> None:
        await self._leaders.close()


def _leader(job: PrefillJob) -> Member:
    """Finds the job's leader. Raises TransferError when the command has no address of it."""
    for member in job.command.group:
        if member.incarnation.id == job.members[0]:
            return member
    raise TransferError(f"request {job.request_id}: no address of its leader {job.members[0]}")
