"""The receiving half of a KV transfer: admits requests, grants writes, counts data, guards pages.

The event loop owns all state; the transport's thread only queues notifications. A request decodes
only after the receiver has counted every (chunk, layer, run).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.concurrency import cancel
from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import (
    HandshakeAsk,
    HandshakeGrant,
    HandshakeRefused,
    HistoryAsk,
    Ticket,
)
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.handshake import Fences, Lease, stale_receiver
from millrace.transfer.push.inbox import Inbox
from millrace.transfer.push.messages import TO_RECEIVER, Kind, Message
from millrace.transfer.push.receive.admission import Admission, AdmissionState
from millrace.transfer.push.receive.buffers import Buffers
from millrace.transfer.push.receive.coverage import CoverageError
from millrace.transfer.push.receive.history_server import HistoryServer
from millrace.transfer.push.receive.landing import Checksums, Landings
from millrace.transfer.push.receive.lease_table import LeaseTable
from millrace.transfer.push.receive.waiting import AdmissionTable
from millrace.transfer.transport.base import Transport, outcome
from millrace.transfer.transport.regions import Memory, TensorLike

log = logging.getLogger(__name__)

TICK_S = 0.1


@dataclass(slots=True, eq=False)
class _Ask:
    """A handshake while it waits for its answer."""

    given_up: bool = False


class ReceiveManager:
    """Receives KV at one decode instance. Build it on the running event loop; callbacks run there.

    `storage` is the pool, with the shape that `KvLayout` gives.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        layout: KvLayout,
        storage: TensorLike,
        identity: tuple[str, int],
        config: TransferConfig,
        callbacks: ReceiveCallbacks,
    ) -> None:
        """Registers the pool. Raises ConfigError when buffered mode or checksums can't serve its
        memory.
        """
        self._transport = transport
        self._layout = layout
        self._identity = Incarnation(*identity)
        self._config = config
        self._tell = callbacks
        self._loop = asyncio.get_running_loop()
        pool = Memory.of_tensor(storage)
        self._region = transport.register(pool)
        self._buffers = Buffers(transport, pool, layout, config) if config.buffer_bytes else None
        self._active = AdmissionTable()
        self._quarantine: dict[Admission, asyncio.Future[None]] = {}
        self._asking: dict[Ticket, list[_Ask]] = {}  # handshakes that wait here
        self._leases = LeaseTable(transport, self._identity, config.lease_s, self._on_lost)
        self._checksums = Checksums(pool, layout) if config.kv_checksum == "on" else None
        self._landings = Landings(
            buffers=self._buffers,
            checksums=self._checksums,
            leases=self._leases,
            on_landed=self._account,
            on_failed=lambda admission, why, sound: self._fail(admission, why, sound=sound),
            on_corrupt=lambda lease: callbacks.on_corrupt(lease.sender.id),
            on_settled=self._settle,
        )
        self._history = HistoryServer(transport, self._region, config.lease_s, self._settle)
        self._fences = Fences(self._identity, layout, config.lease_s)
        self._inbox = Inbox(transport, TO_RECEIVER, self._read)
        self._ticker = self._loop.create_task(self._tick_forever())

    @property
    def region(self) -> int:
        """Returns the pool's number at the transport."""
        return self._region

    # -- for the owner of the pages

    @property
    def num_leases(self) -> int:
        """Returns the number of senders that may still write here."""
        return len(self._leases)

    def admit(
        self,
        request_id: str,
        pages: Sequence[int],
        prompt_tokens: int,
        attempt: int = 1,
        *,
        shard: tuple[int, int] | None = None,
        kept_tokens: int = 0,
    ) -> None:
        """Expects a request's prompt in `pages`, in token order.

        With `shard`, expects only its tokens [start, end), which `pages` then hold: each of many
        receivers lands on its own. The first `kept_tokens` lie in `pages` already. Raises
        TransferError if the request is admitted already, or the pages can't hold it.
        """
        try:
            admission = Admission(
                request_id, self._layout, list(pages), prompt_tokens, attempt, shard, kept_tokens
            )
        except ValueError as error:
            raise TransferError(f"request {request_id}: {error}") from error
        self._active.add(admission)

    def rewind(self, request_id: str, attempt: int, kept_tokens: int) -> None:
        """Starts another attempt that sends the tokens after `kept_tokens`, which must have landed.

        Messages of earlier attempts' senders are not counted any more. Those senders may still
        finish writes of the same KV into the same pages, which is harmless; `release` waits for
        them. Raises TransferError when the request or the tokens aren't here.
        """
        admission = self._active.get(request_id)
        if admission is None:
            raise TransferError(f"request {request_id} is not admitted here")
        claim = admission.claim
        try:
            admission.rewind(attempt, kept_tokens)
        except ValueError as error:
            raise TransferError(f"request {request_id}: {error}") from error
        self._end_claim(claim)
        self._history.stop(admission)
        self._leases.send_state(admission)
        self._active.wake(request_id)

    async def release(self, request_id: str) -> None:
        """Gives a request up, or takes its landed pages over. Returns when the pages may be reused.

        Returns at once if all has landed or nothing was granted. Else the pages are in quarantine
        until no write can reach them, see `Lease.quiet`, and no history is read from them. The id
        may be admitted again during the quarantine.
        """
        admission = self._active.pop(request_id)
        if admission is None:
            return
        if admission.state is AdmissionState.OPEN:
            admission.state = AdmissionState.RELEASED
        self._end_claim(admission.claim)
        self._history.stop(admission)
        self._leases.send_state(admission)
        free = self._quarantine[admission] = self._loop.create_future()
        self._settle()
        await asyncio.shield(free)

    # -- for senders

    async def handshake(self, ask: HandshakeAsk, wait_s: float) -> HandshakeGrant:
        """Grants a sender the right to write; waits up to `wait_s` for admission and a backend.

        Raises HandshakeRefused when the sender will never be granted, HandshakeQueued when it may
        ask again: its request keeps its place.
        """
        asking = _Ask()
        self._asking.setdefault(ask.ticket, []).append(asking)
        try:
            return await self._handshake(ask, asking, self._loop.time() + wait_s)
        finally:
            self._asking[ask.ticket].remove(asking)
            if not self._asking[ask.ticket]:
                del self._asking[ask.ticket]

    async def _handshake(
        self, ask: HandshakeAsk, asking: _Ask, deadline_s: float
    ) -> HandshakeGrant:
        ticket = ask.ticket
        admission = await self._expected(ask, deadline_s)
        if reason := admission.mismatch(ask.start_token, ask.num_tokens):
            raise HandshakeRefused(f"request {ticket.request_id}: {reason}")
        admission.senders.add(ticket.sender)
        peer = await outcome(self._transport.connect(ask.agent_metadata))
        lease = self._leases.standing(admission, ticket)
        if lease is None:
            backend = None
            self._check_awaited(admission, ticket, asking)
            if self._buffers is not None:
                backend = await self._buffers.acquire(admission, ask, deadline_s)
                try:
                    self._check_awaited(admission, ticket, asking)
                except HandshakeRefused:
                    self._buffers.done(admission, ticket)
                    raise
            lease = self._leases.open(admission, ask, peer, backend)
        return self._grant(admission, lease)

    async def finish(
        self, ticket: Ticket, *, total_chunks: int, message: object, wait_s: float
    ) -> str:
        """Takes prefill's report of its end and passes `message` on. Returns a refusal, or ""."""
        if reason := stale_receiver(ticket.receiver, self._identity):
            return f"request {ticket.request_id}: {reason}"
        try:
            admission = await self._active.wait_for(ticket, self._loop.time() + wait_s)
        except HandshakeRefused as error:
            return str(error)
        if reason := admission.finish_refusal(ticket.sender):
            return f"request {ticket.request_id}: {reason}"
        admission.finish(total_chunks, time.monotonic())
        self._tell.on_first_tokens(ticket.request_id, message)
        self._land_if_complete(admission)
        return ""

    def abort(self, ticket: Ticket, *, reason: str, drained: bool) -> None:
        """Takes a sender's abort; with `drained` none of its writes is in flight any more. A
        handshake of the sender that still waits here is granted nothing: nobody would end its
        lease.
        """
        if ticket.receiver != self._identity:
            return
        asking = self._asking.get(ticket, ())
        for one in asking:
            one.given_up = True
        current = self._active.get(ticket.request_id)
        admissions = [a for a in self._quarantine if a.request_id == ticket.request_id]
        if current is not None:
            admissions.append(current)
            is_known = ticket.sender in current.senders or bool(asking)
            if current.attempt == ticket.attempt and is_known:
                self._fail(current, f"{ticket.sender.id} gave the transfer up: {reason}")
        for admission in admissions if drained else ():
            self._leases.drained(admission, ticket)
        self._settle()

    async def send_history(self, ask: HistoryAsk, wait_s: float) -> None:
        """Begins to write an earlier attempt's KV to the asker, layer by layer.

        Waits up to `wait_s` for the attempt's admission. Raises HandshakeRefused when some of the
        KV has not landed here, or TransferError for bad metadata.
        """
        admission = await self._expected(ask, self._loop.time() + wait_s)
        peer = await outcome(self._transport.connect(ask.agent_metadata))
        self._check_awaited(admission, ask.ticket)
        self._history.give(admission, ask, peer)

    # -- upkeep

    def check_integrity(self) -> None:
        """Raises IntegrityError for a lease, backend or wait that outlived its request."""
        admissions = [*self._active, *self._quarantine]
        if not admissions:
            self._history.check_integrity()
        pages = [page for a in admissions for page in a.own_pages]
        if len(set(pages)) != len(pages):
            raise IntegrityError("two requests receive into one page")
        idle = not admissions and not self.num_leases
        if self._buffers is not None:
            self._buffers.check_integrity(idle=idle)
        elif not admissions and self.num_leases:
            raise IntegrityError(f"no request is admitted, yet there are {self.num_leases} leases")

    async def close(self) -> None:
        """Ends upkeep. Callers that wait in `release` return: the pool ends with the process."""
        await cancel(self._ticker)
        for free in self._quarantine.values():
            if not free.done():
                free.set_result(None)
        self._leases.close()
        if self._buffers is not None:
            await self._buffers.close()
        if self._checksums is not None:
            await asyncio.to_thread(self._checksums.close)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:
                log.exception("upkeep of KV transfers failed; it continues")

    def _tick(self, now_s: float) -> None:
        """Renews leases, and ends what is overdue."""
        for lease, admission in self._leases.renew(now_s):
            why = f"no message from {lease.sender.id} for {self._config.lease_s:g} s"
            self._fail_of(lease, admission, why)
        for admission in self._active:
            if reason := admission.overdue(now_s, self._config.transfer_timeout_s):
                self._fail(admission, reason)
        self._settle()

    # -- leases

    async def _expected(self, ask: HandshakeAsk | HistoryAsk, deadline_s: float) -> Admission:
        """Returns the admission that a sender means. Raises HandshakeRefused."""
        self._fences.check(ask, time.monotonic())
        self._leases.lose_incarnations(ask.ticket.sender)
        return await self._active.wait_for(ask.ticket, deadline_s)

    def _grant(self, admission: Admission, lease: Lease) -> HandshakeGrant:
        lease.renewed_s = time.monotonic()
        region, offset = self._region, 0
        if self._buffers is not None and lease.backend is not None:
            region, offset = self._buffers.region, self._buffers.offset(lease.backend)
        return HandshakeGrant(
            lease=lease.number,
            layout=self._layout,
            pages=admission.side.pages.tolist(),
            agent_metadata=self._transport.metadata(),
            region=region,
            lease_s=self._config.lease_s,
            buffered=self._buffers is not None,
            buffer_offset=offset,
            buffer_bytes=self._config.buffer_bytes,
            checksums=self._checksums is not None,
        )

    def _check_awaited(
        self, admission: Admission, ticket: Ticket, asking: _Ask | None = None
    ) -> None:
        """Raises HandshakeRefused if the ticket's attempt ended, or its sender gave up, while the
        sender waited here.
        """
        if not admission.awaits(ticket.attempt) or (asking is not None and asking.given_up):
            raise HandshakeRefused(f"request {ticket.request_id} was given up")

    def _end_claim(self, claim: str) -> None:
        if self._buffers is not None:
            self._buffers.end(claim)

    def _on_lost(self, lease: Lease, admission: Admission) -> None:
        self._fail_of(lease, admission, f"{lease.sender.id} is gone")

    def _fail_of(self, lease: Lease, admission: Admission, why: str) -> None:
        """Fails the attempt when its sender ended with data left to send."""
        if admission.counts(lease):
            self._fail(admission, why)

    def _fail(self, admission: Admission, message: str, *, sound: bool = True) -> None:
        """Fails an attempt. `sound`: the landed KV is right, and another attempt may continue from
        it.
        """
        if admission.state is not AdmissionState.OPEN:
            return
        admission.state = AdmissionState.FAILED
        admission.failure = message
        self._end_claim(admission.claim)
        self._leases.send_state(admission)
        kept_tokens = admission.kept_tokens if sound else 0
        self._tell.on_failed(admission.request_id, message, admission.attempt, kept_tokens)

    def _settle(self) -> None:
        """Ends quiet leases, and frees pages that no write can reach any more."""
        for lease, admission in self._leases.sweep(time.monotonic()):
            if self._buffers is not None:
                self._buffers.done(admission, lease)
            if self._checksums is not None:
                self._checksums.forget(lease)
        for admission, free in list(self._quarantine.items()):
            if not self._history.reads(admission) and not self._leases.reaches_pages(admission):
                del self._quarantine[admission]
                if not free.done():
                    free.set_result(None)

    # -- notifications

    def _read(self, peer: str, message: Message) -> None:
        held = self._leases.of_message(peer, message)
        if held is None:
            log.debug("stale %s of %s for request %s", message.kind, peer, message.request_id)
            return
        lease, admission = held
        now_s = time.monotonic()
        if lease.lapsed(now_s, self._config.lease_s):  # before it is renewed
            self._fail_of(lease, admission, f"no message from {lease.sender.id} in time")
        lease.heard_s = now_s
        if message.kind is Kind.WRITTEN and admission.awaits(lease.attempt):
            self._landings.take(lease, admission, message)
        elif message.kind is Kind.DONE:
            lease.drained = True
            self._settle()
        elif message.kind is Kind.DRAINED:
            self._fail_of(lease, admission, f"{lease.sender.id} gave the transfer up")
            lease.drained = True
            self._settle()

    def _account(self, admission: Admission, lease: Lease, message: Message) -> None:
        try:
            admission.landed(message.parts, lease, time.monotonic())
        except CoverageError as error:
            self._fail(admission, str(error), sound=False)
        else:
            if tokens := admission.take_progress():
                self._tell.on_prefix(admission.request_id, admission.attempt, tokens)
            self._land_if_complete(admission)

    def _land_if_complete(self, admission: Admission) -> None:
        if admission.state is AdmissionState.OPEN and admission.complete:
            admission.state = AdmissionState.LANDED
            for lease in admission.leases:
                if lease.attempt == admission.attempt:
                    lease.drained = True  # every announced write has landed
            self._end_claim(admission.claim)
            self._settle()
            self._tell.on_landed(admission.request_id)
