"""Sends a link's messages, and records when it last heard from each peer and last sent to it.

A member writes to a peer only within `lease_s` seconds of the peer's last message. A peer that has
waited for a member for longer than `lease_s` may free its pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial

from millrace.transfer.ring.messages import RingKind, RingMessage
from millrace.transfer.transport.base import Transport


class Contacts:
    """The times of each peer's last message and of the last message to it, by transport name.

    The link's lock guards it.
    """

    def __init__(
        self,
        transport: Transport,
        key: tuple[str, int],
        peers: Iterable[str],
        lease_s: float,
        on_sent: Callable[[RingKind, int, Future[None]], None],
    ) -> None:
        """`key`: the request and the attempt that all messages name. `on_sent` gets the end of
        each message, with its kind and its chunk.
        """
        self._transport = transport
        self._key = key
        self._on_sent = on_sent
        now_s = time.monotonic()
        self._heard_s = dict.fromkeys(peers, now_s)
        self._sent_s = dict(self._heard_s)
        self._asked: set[str] = set()  # whether this member may still write
        self._lease_s = lease_s

    def __contains__(self, peer: str) -> bool:
        return peer in self._heard_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard_s)

    def add(self, peer: str) -> None:
        self._heard_s[peer] = self._sent_s[peer] = time.monotonic()

    def heard(self, peer: str) -> None:
        self._heard_s[peer] = time.monotonic()
        self._asked.discard(peer)

    def heard_s(self, peer: str) -> float:
        """Returns when the peer was last heard of, in seconds of time.monotonic."""
        return self._heard_s[peer]

    def sent_s(self, peer: str) -> float:
        """Returns when the peer was last sent a message, in seconds of time.monotonic."""
        return self._sent_s[peer]

    def message(self, kind: RingKind, chunk: int = 0, number: int = 0) -> RingMessage:
        request_id, attempt = self._key
        return RingMessage(
            kind=kind, request_id=request_id, attempt=attempt, chunk=chunk, number=number
        )

    def tell(self, peer: str, kind: RingKind, chunk: int = 0, number: int = 0) -> None:
        """Sends a message without data."""
        self._sent_s[peer] = time.monotonic()
        sent = self._transport.notify(peer, self.message(kind, chunk, number).encode())
        if kind is not RingKind.DRAINED:  # a peer that waits for it asks again
            sent.add_done_callback(partial(self._on_sent, kind, chunk))

    def may_write(self, peer: str) -> bool:
        """Returns whether the peer was heard of within `lease_s`; otherwise asks it, once per
        message of the peer.
        """
        may = time.monotonic() - self._heard_s[peer] <= self._lease_s
        if not may and peer not in self._asked:
            self._asked.add(peer)
            self.tell(peer, RingKind.RENEW)
        return may
