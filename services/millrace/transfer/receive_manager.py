"""The receiving half of a KV transfer: admits, grants, accounts, and guards pages until it is safe.

All state belongs to the event loop; the transport's thread only queues notifications for it. A
request decodes after every (chunk, layer, run) was accounted for, and never otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv_layout import KvLayout
from millrace.core.kv_transfer import (
    HandshakeAsk,
    HandshakeGrant,
    HandshakeRefused,
    Incarnation,
    Ticket,
)
from millrace.transfer.admission import Admission, AdmissionState
from millrace.transfer.coverage import CoverageError
from millrace.transfer.handshake import SLOTS, Lease, refusal, stale_receiver
from millrace.transfer.inbox import Inbox
from millrace.transfer.layout import layer_token_bytes
from millrace.transfer.lease_table import LeaseTable
from millrace.transfer.memory import Memory, TensorLike
from millrace.transfer.messages import TO_RECEIVER, Kind, Message
from millrace.transfer.staging import Staging, slot_tokens
from millrace.transfer.transport import Transport, outcome
from millrace.transfer.waiting import AdmissionTable, BackendQueue

log = logging.getLogger(__name__)

TICK_S = 0.1


class ReceiveManager:
    """One per decode instance. Build it on the running event loop; callbacks run there.

    `storage` is the pool, shaped as `KvLayout` says. on_first_tokens gets the message of `finish`
    as it came; on_landed says that all KV is in its pages; on_failed that it never will be.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        layout: KvLayout,
        storage: TensorLike,
        identity: tuple[str, int],
        config: TransferConfig,
        on_first_tokens: Callable[[str, Any], None],
        on_landed: Callable[[str], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        """Registers the pool. Raises ConfigError when buffered mode can't serve its memory."""
        self._transport = transport
        self._layout = layout
        self._identity = Incarnation(*identity)
        self._config = config
        self._on_first_tokens = on_first_tokens
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        pool = Memory.of_tensor(storage)
        self._region = transport.register(pool)
        self._staging: Staging | None = None
        self._backends: BackendQueue | None = None
        if config.buffer_bytes:
            self._staging = Staging(
                transport, pool, count=config.backends, buffer_bytes=config.buffer_bytes
            )
            self._backends = BackendQueue(config.backends)
        self._metadata = transport.metadata()  # once: it may wait for the transport's thread
        self._active = AdmissionTable()
        self._quarantine: dict[Admission, asyncio.Future[None]] = {}
        self._leases = LeaseTable(transport, self._identity, config.lease_s, self._on_lost)
        self._newest: dict[str, int] = {}
        self._inbox = Inbox(transport, TO_RECEIVER, self._read)
        self._ticker = self._loop.create_task(self._tick_forever())

    # -- for the owner of the pages

    def admit(self, request_id: str, pages: Sequence[int], prompt_tokens: int) -> None:
        """Expects a request's prompt in `pages`, in token order.

        Raises TransferError if it is admitted already, or the pages can't hold it.
        """
        try:
            admission = Admission(request_id, self._layout, list(pages), prompt_tokens)
        except ValueError as error:
            raise TransferError(f"request {request_id}: {error}") from error
        self._active.add(admission)

    async def release(self, request_id: str) -> None:
        """Gives a request up, or takes its landed pages over. Returns when they may be reused.

        At once if all had landed or nothing was granted. Else the pages are in quarantine until
        no write can reach them: see `Lease.quiet`. The id may be admitted anew meanwhile.
        """
        admission = self._active.pop(request_id)
        if admission is None:
            return
        if admission.state is AdmissionState.OPEN:
            admission.state = AdmissionState.RELEASED
        self._end_claim(admission)
        self._leases.tell_state(admission)
        free = self._quarantine[admission] = self._loop.create_future()
        self._settle()
        await asyncio.shield(free)

    def sender_lost(self, sender_id: str) -> None:
        """The control plane has fenced a sender off: none of its lives will come back."""
        self._leases.lose_lives(sender_id)

    # -- for senders

    async def handshake(self, ask: HandshakeAsk, wait_s: float) -> HandshakeGrant:
        """Grants a sender the right to write; waits up to `wait_s` for admission and a backend.

        Raises HandshakeRefused when it never will, HandshakeQueued when the sender may ask again:
        its request keeps its place.
        """
        deadline_s = self._loop.time() + wait_s
        request_id, sender = ask.ticket.request_id, ask.ticket.sender
        if reason := refusal(
            ask, receiver=self._identity, layout=self._layout, newest=self._newest
        ):
            raise HandshakeRefused(f"request {request_id}: {reason}")
        self._newest[sender.id] = sender.generation
        self._leases.lose_lives(sender.id, before=sender.generation)
        admission = await self._active.wait_for(request_id, deadline_s)
        admission.senders.add(sender)
        peer = await outcome(self._transport.connect(ask.agent_metadata))
        lease = self._leases.standing(admission, sender)
        if lease is None:
            backend = await self._backend_for(admission, ask, deadline_s)
            if admission.state is not AdmissionState.OPEN:
                if self._backends is not None:
                    self._backends.done(admission.claim, sender)
                raise HandshakeRefused(f"request {request_id} was given up")
            lease = self._leases.open(admission, ask, peer, backend)
        return self._grant(admission, lease)

    async def finish(
        self, ticket: Ticket, *, total_chunks: int, message: object, wait_s: float
    ) -> str:
        """Prefill reports its end: hands `message` on. Returns a refusal, or nothing."""
        if reason := stale_receiver(ticket.receiver, self._identity):
            return f"request {ticket.request_id}: {reason}"
        try:
            admission = await self._active.wait_for(ticket.request_id, self._loop.time() + wait_s)
        except HandshakeRefused as error:
            return str(error)
        if ticket.sender not in admission.senders:
            return f"request {ticket.request_id}: {ticket.sender} has not shaken hands"
        if admission.finished:
            return f"request {ticket.request_id}: prefill has finished already"
        admission.finish(total_chunks, time.monotonic())
        self._on_first_tokens(ticket.request_id, message)
        self._land_if_complete(admission)
        return ""

    def abort(self, ticket: Ticket, *, reason: str, drained: bool) -> None:
        """A sender gives up; with `drained` none of its writes is in flight any more."""
        if ticket.receiver != self._identity:
            return
        current = self._active.get(ticket.request_id)
        admissions = [a for a in self._quarantine if a.request_id == ticket.request_id]
        if current is not None and ticket.sender in current.senders:
            self._fail(current, f"{ticket.sender.id} gave the transfer up: {reason}")
            admissions.append(current)
        for admission in admissions if drained else ():
            if (lease := self._leases.standing(admission, ticket.sender)) is not None:
                lease.drained = True
        self._settle()

    # -- upkeep

    def check_integrity(self) -> None:
        """Raises IntegrityError for a lease, backend or wait that outlived its request."""
        admissions = [*self._active, *self._quarantine]
        pages = [page for a in admissions for page in a.side.pages.tolist()]
        if len(set(pages)) != len(pages):
            raise IntegrityError("two requests receive into one page")
        idle = not admissions and not len(self._leases)
        if self._backends is not None:
            self._backends.check_integrity(idle=idle)
        elif not admissions and len(self._leases):
            raise IntegrityError(
                f"no request is admitted, yet there are {len(self._leases)} leases"
            )

    async def close(self) -> None:
        """Ends upkeep. Whoever still waits in `release` returns: the pool ends with the process."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        for free in self._quarantine.values():
            if not free.done():
                free.set_result(None)
        self._leases.close()
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:
                log.exception("upkeep of KV transfers failed; it goes on")

    def _tick(self, now_s: float) -> None:
        """Renews leases, and ends what is overdue."""
        for lease, admission in self._leases.renew(now_s):
            self._fail(admission, f"no news from {lease.sender.id} for {self._config.lease_s:g} s")
        for admission in self._active:
            if reason := admission.overdue(now_s, self._config.transfer_timeout_s):
                self._fail(admission, reason)
        self._settle()

    # -- leases

    async def _backend_for(
        self, admission: Admission, ask: HandshakeAsk, deadline_s: float
    ) -> int | None:
        """A staging buffer in buffered mode, else None."""
        if self._backends is None:
            return None
        token_bytes = layer_token_bytes(ask.layout, self._layout)
        if slot_tokens(self._config.buffer_bytes, token_bytes) < 1:
            raise HandshakeRefused(
                f"transfer.buffer_bytes is {self._config.buffer_bytes}; it must hold at least "
                f"{SLOTS} tokens of a layer, {SLOTS * token_bytes} bytes"
            )
        return await self._backends.acquire(admission.claim, ask.ticket.sender, deadline_s)

    def _grant(self, admission: Admission, lease: Lease) -> HandshakeGrant:
        lease.renewed_s = time.monotonic()
        offset = 0
        if self._staging is not None and lease.backend is not None:
            offset = self._staging.offset(lease.backend)
        return HandshakeGrant(
            lease=lease.number,
            layout=self._layout,
            pages=admission.side.pages.tolist(),
            agent_metadata=self._metadata,
            region=self._region if self._staging is None else self._staging.region,
            lease_s=self._config.lease_s,
            buffered=self._staging is not None,
            buffer_offset=offset,
            buffer_bytes=self._config.buffer_bytes,
        )

    def _end_claim(self, admission: Admission) -> None:
        if self._backends is not None:
            self._backends.end(admission.claim)

    def _on_lost(self, lease: Lease, admission: Admission) -> None:
        self._fail(admission, f"{lease.sender.id} is gone")

    def _fail(self, admission: Admission, message: str) -> None:
        if admission.state is not AdmissionState.OPEN:
            return
        admission.state = AdmissionState.FAILED
        admission.failure = message
        self._end_claim(admission)
        self._leases.tell_state(admission)
        self._on_failed(admission.request_id, message)

    def _settle(self) -> None:
        """Ends leases that are quiet, and frees the pages that nothing can reach any more."""
        for lease, admission in self._leases.sweep(time.monotonic()):
            if self._backends is not None:
                self._backends.done(admission.claim, lease.sender)
        for admission, free in list(self._quarantine.items()):
            if not self._leases.reaches_pages(admission):
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
        if lease.lapsed(now_s, self._config.lease_s):  # before the news hides the silence
            self._fail(admission, f"no news from {lease.sender.id} in time")
        lease.heard_s = now_s
        if message.kind is Kind.WRITTEN and admission.state is AdmissionState.OPEN:
            self._written(lease, admission, message)
        elif message.kind is Kind.DONE:
            lease.drained = True
            self._settle()
        elif message.kind is Kind.DRAINED:
            lease.drained = True
            if not admission.finished:
                self._fail(admission, f"{lease.sender.id} gave the transfer up")
            self._settle()

    def _written(self, lease: Lease, admission: Admission, message: Message) -> None:
        try:
            admission.check(message.parts, lease)
        except CoverageError as error:
            self._fail(admission, str(error))
            return
        if self._staging is None or lease.backend is None:
            self._account(lease, admission, message)
            return
        lease.copies += 1
        copied = self._staging.scatter(message, lease.backend, lease.layout, admission.side)
        copied.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(
                self._copied, lease, admission, message, done
            )
        )

    def _copied(
        self, lease: Lease, admission: Admission, message: Message, done: Future[None]
    ) -> None:
        lease.copies -= 1
        if (error := done.exception()) is not None:
            self._fail(admission, f"a staging slot could not be copied: {error}")
        elif admission.state is AdmissionState.OPEN:
            self._leases.tell(lease, Kind.SLOT_FREE, message.slot)
            self._account(lease, admission, message)
        self._settle()

    def _account(self, lease: Lease, admission: Admission, message: Message) -> None:
        try:
            admission.landed(message.parts, lease, time.monotonic())
        except CoverageError as error:
            self._fail(admission, str(error))
        else:
            self._land_if_complete(admission)

    def _land_if_complete(self, admission: Admission) -> None:
        if admission.state is AdmissionState.OPEN and admission.complete:
            admission.state = AdmissionState.LANDED
            for lease in admission.leases:
                lease.drained = True  # every announced write has landed
            self._end_claim(admission)
            self._settle()
            self._on_landed(admission.request_id)
