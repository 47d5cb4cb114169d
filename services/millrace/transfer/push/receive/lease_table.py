"""Keeps the leases that a receiver has granted, and sends messages to their holders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from millrace.core.incarnation import Incarnation
from millrace.core.kv.transfer import HandshakeAsk, Ticket
from millrace.transfer.push.handshake import Lease
from millrace.transfer.push.messages import Kind, Message
from millrace.transfer.push.receive.admission import Admission, AdmissionState
from millrace.transfer.transport.base import PeerLostError, Transport

#: The receiver renews each lease this many times in `lease_s`.
RENEWALS = 4

_KINDS = {
    AdmissionState.OPEN: Kind.RENEW,
    AdmissionState.FAILED: Kind.STOP,
    AdmissionState.RELEASED: Kind.DROP,
    AdmissionState.LANDED: Kind.DROP,
}


class LeaseTable:
    """Holds leases by number. Listens on the transport while it holds any. Belongs to the event
    loop.

    `on_lost` gets a lease whose sender has ended or can't be reached any more.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Incarnation,
        lease_s: float,
        on_lost: Callable[[Lease, Admission], None],
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._leases: dict[int, tuple[Lease, Admission]] = {}
        self._numbers = 0
        self._listening: ExitStack | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self, admission: Admission, ask: HandshakeAsk, peer: str, backend: int | None
    ) -> Lease:
        """Opens a new lease of an open admission."""
        now_s = time.monotonic()
        self._numbers += 1
        lease = Lease(
            number=self._numbers,
            request_id=admission.request_id,
            attempt=ask.ticket.attempt,
            sender=ask.ticket.sender,
            peer=peer,
            layout=ask.layout,
            backend=backend,
            heard_s=now_s,
            renewed_s=now_s,
            sent_s=now_s,
        )
        admission.leases.append(lease)
        self._leases[lease.number] = (lease, admission)
        if self._listening is None:
            self._listening = ExitStack()
            self._listening.enter_context(self._transport.listening())
        return lease

    def standing(self, admission: Admission, ticket: Ticket) -> Lease | None:
        """Returns the lease of the ticket's sender and attempt while it stands."""
        whose = (ticket.sender, ticket.attempt)
        return next(
            (
                lease
                for lease in admission.leases
                if (lease.sender, lease.attempt) == whose and lease.number in self._leases
            ),
            None,
        )

    def drained(self, admission: Admission, ticket: Ticket) -> None:
        """Notes that the ticket's sender writes no more for its attempt."""
        if (lease := self.standing(admission, ticket)) is not None:
            lease.drained = True

    def of_message(self, peer: str, message: Message) -> tuple[Lease, Admission] | None:
        """Returns the lease and admission of a notification; None when it is stale."""
        held = self._leases.get(message.lease)
        if held is None or message.generation != self._identity.generation:
            return None
        known = (held[0].peer, held[0].request_id)
        return held if known == (peer, message.request_id) else None

    def reaches_pages(self, admission: Admission) -> bool:
        """Returns whether a write may still reach the pages of an admission.

        A buffered sender reaches only its staging buffer; only our own copies reach pages.
        """
        return any(
            lease.copies or (lease.backend is None and lease.number in self._leases)
            for lease in admission.leases
        )

    def send(self, lease: Lease, kind: Kind, slot: int = 0) -> None:
        """Sends a message to the lease's sender, and may find out that the sender is gone."""
        message = Message(
            kind=kind,
            request_id=lease.request_id,
            lease=lease.number,
            generation=self._identity.generation,
            slot=slot,
        )
        lease.sent_s = time.monotonic()
        if kind is Kind.RENEW:
            lease.renewed_s = lease.sent_s
        sent = self._transport.notify(lease.peer, message.encode())
        sent.add_done_callback(partial(self._on_sent, lease.number))

    def send_state(self, admission: Admission) -> None:
        """Reports the admission's state to the senders of all its leases."""
        for lease in admission.leases:
            if lease.number in self._leases and lease.lost_s is None:
                self.send(lease, _kind_for(lease, admission))

    def lose_incarnations(self, later: Incarnation) -> None:
        """Marks the earlier incarnations of a sender as ended."""
        for lease, admission in list(self._leases.values()):
            sender = lease.sender
            if sender.id == later.id and sender.generation < later.generation:
                self._lose(lease, admission, dead=False)

    def renew(self, now_s: float) -> list[tuple[Lease, Admission]]:
        """Renews due leases and finds ended senders. Returns the leases that have lapsed."""
        lapsed = []
        for lease, admission in list(self._leases.values()):
            if self._transport.is_dead(lease.peer):
                self._lose(lease, admission, dead=True)
            elif lease.lost_s is None and now_s - lease.sent_s > self._lease_s / RENEWALS:
                self.send(lease, _kind_for(lease, admission))
            if lease.lapsed(now_s, self._lease_s):
                lapsed.append((lease, admission))
        return lapsed

    def sweep(self, now_s: float) -> list[tuple[Lease, Admission]]:
        """Removes and returns the leases under which nothing can be written any more."""
        ended = [
            (lease, admission)
            for lease, admission in self._leases.values()
            if not lease.copies and lease.quiet(now_s, self._lease_s)
        ]
        for lease, _ in ended:
            del self._leases[lease.number]
        if not self._leases:
            self.close()
        return ended

    def close(self) -> None:
        """Stops listening."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _on_sent(self, number: int, sent: Future[None]) -> None:
        """Notes a lost sender. Runs on the transport's thread."""
        if not sent.cancelled() and isinstance(sent.exception(), PeerLostError):
            self._loop.call_soon_threadsafe(self._unreachable, number)

    def _unreachable(self, number: int) -> None:
        if (held := self._leases.get(number)) is not None:
            self._lose(*held, dead=False)

    def _lose(self, lease: Lease, admission: Admission, *, dead: bool) -> None:
        lease.lose(time.monotonic(), dead=dead)
        self._on_lost(lease, admission)


def _kind_for(lease: Lease, admission: Admission) -> Kind:
    """Returns the message for a lease: STOP where its attempt is over, else by the admission's
    state.
    """
    return _KINDS[admission.state] if lease.attempt == admission.attempt else Kind.STOP
