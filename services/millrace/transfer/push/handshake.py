"""Decides the backend allocation handshake (Tetris section 4.2). Pure: the clock is an argument.

A receiver without staging buffers grants at once: data goes straight into the request's pages and
needs no backend. So `transfer.backends` limits buffered receivers only. A buffered receiver has
that many staging buffers. When none is free, "requests are sorted by the first handshake
timestamp", and backends are reserved "for each request until all its chunks are transferred": a
backend stays with its request and serves the request's next sender until the request ends. A later
request never takes a backend that an earlier request waits for.

Each attempt at a request is a claim of its own. The claim is ordered by the request's first
handshake. A failed claim reserves nothing while the scheduler plans the request again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeAsk, HandshakeRefused, HistoryAsk
from millrace.transfer.transport.layout import mismatch
from millrace.transfer.writer import Writer

#: A staging buffer is cut into slots: some are scattered while the next ones are written.
SLOTS = 8


def refusal(
    ask: HandshakeAsk | HistoryAsk,
    *,
    receiver: Incarnation,
    layout: KvLayout,
    newest: Mapping[str, int],
) -> str:
    """Returns the reason to refuse a handshake as stale; empty to accept it.

    `newest` maps each sender to its greatest generation so far: earlier incarnations are stale.
    """
    ticket = ask.ticket
    if stale := stale_receiver(ticket.receiver, receiver):
        return stale
    if ticket.sender.generation < newest.get(ticket.sender.id, 0):
        return (
            f"stale sender: {ticket.sender} was replaced by generation {newest[ticket.sender.id]}"
        )
    return mismatch(ask.layout, layout)


class Fences:
    """Decides at a receiver which incarnations of senders may speak to it.

    Generations come from the senders' wall clocks: a sender that starts again after its clock was
    set back looks like an earlier incarnation. So a fence lasts until the later one has asked for
    nothing for `lease_s`. A sender that was frozen for longer gains nothing by that: its attempts
    are over.
    """

    def __init__(self, receiver: Incarnation, layout: KvLayout, lease_s: float) -> None:
        self._receiver = receiver
        self._layout = layout
        self._lease_s = lease_s
        self._newest: dict[str, int] = {}
        self._asked_s: dict[str, float] = {}

    def check(self, ask: HandshakeAsk | HistoryAsk, now_s: float) -> None:
        """Raises HandshakeRefused for a stale ask; else fences earlier incarnations of the
        sender.
        """
        sender = ask.ticket.sender
        if now_s - self._asked_s.get(sender.id, now_s) > self._lease_s:
            del self._newest[sender.id], self._asked_s[sender.id]
        reason = refusal(ask, receiver=self._receiver, layout=self._layout, newest=self._newest)
        if reason:
            raise HandshakeRefused(f"request {ask.ticket.request_id}: {reason}")
        self._newest[sender.id], self._asked_s[sender.id] = sender.generation, now_s


def stale_receiver(meant: Incarnation, actual: Incarnation) -> str:
    """Returns why a message for `meant` is not for `actual`; empty when both are one
    incarnation.
    """
    return (
        "" if meant == actual else f"stale receiver: the message is for {meant}, this is {actual}"
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Lease(Writer):
    """One sender's right to write for one attempt at a request, and the known state of its end.

    Times are of the caller's clock.
    """

    number: int
    request_id: str
    attempt: int
    sender: Incarnation
    layout: KvLayout
    backend: int | None
    heard_s: float
    sent_s: float
    copies: int = 0

    def lapsed(self, now_s: float, lease_s: float) -> bool:
        """Returns whether the sender has been silent for more than `lease_s`."""
        return not self.drained and now_s - self.heard_s > lease_s


@dataclass(slots=True)
class _Claim:
    """A request's place in the order, its waiting senders, and the backends that it holds."""

    first_ask_s: float
    order: int
    waiting: list[Incarnation]
    idle: list[int]
    busy: dict[Incarnation, int]
    ended: bool = False


class Backends:
    """Assigns staging buffers to senders in the order of their requests' first handshakes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._claims: dict[str, _Claim] = {}
        self._asks = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def ask(self, claim_id: str, sender: Incarnation, first_ask_s: float) -> None:
        """Adds a sender that waits. Its request keeps the place of its first handshake for ever."""
        claim = self._claims.get(claim_id)
        if claim is None:
            self._asks += 1
            claim = self._claims[claim_id] = _Claim(first_ask_s, self._asks, [], [], {})
        if sender not in claim.waiting and sender not in claim.busy:
            claim.waiting.append(sender)

    def withdraw(self, claim_id: str, sender: Incarnation) -> None:
        """Removes a sender that waited. Its request keeps its place."""
        claim = self._claims.get(claim_id)
        if claim is not None and sender in claim.waiting:
            claim.waiting.remove(sender)

    def grant(self) -> list[tuple[str, Incarnation, int]]:
        """Grants every backend that can be granted now; returns (request, sender, backend) in
        order.

        A waiting request has taken all free backends. A later request continues with the backends
        that it holds, since the earlier request may have to wait for its end; it gets no others.
        """
        granted = []
        ordered = sorted(self._claims.items(), key=lambda c: (c[1].first_ask_s, c[1].order))
        for claim_id, claim in ordered:
            while claim.waiting and (claim.idle or self._free):
                backend = claim.idle.pop() if claim.idle else self._free.pop()
                sender = claim.waiting.pop(0)
                claim.busy[sender] = backend
                granted.append((claim_id, sender, backend))
        return granted

    def done(self, claim_id: str, sender: Incarnation) -> None:
        """Frees a sender's buffer, which no write can reach any more, for the request's next
        sender.
        """
        claim = self._claims.get(claim_id)
        if claim is not None and sender in claim.busy:
            claim.idle.append(claim.busy.pop(sender))
            self._settle(claim_id, claim)

    def end(self, claim_id: str) -> None:
        """Ends a request. Each buffer that is still written to is freed when its sender is done."""
        claim = self._claims.get(claim_id)
        if claim is not None:
            claim.ended = True
            claim.waiting.clear()
            self._settle(claim_id, claim)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a backend is lost or has two owners."""
        held = [b for c in self._claims.values() for b in (*c.idle, *c.busy.values())]
        if sorted([*held, *self._free]) != list(range(self._count)):
            raise IntegrityError(f"backends: {held} are held, {self._free} free, of {self._count}")

    def _settle(self, claim_id: str, claim: _Claim) -> None:
        if claim.ended:
            self._free += claim.idle
            claim.idle.clear()
            if not claim.busy:
                del self._claims[claim_id]
