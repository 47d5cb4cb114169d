"""Equal places in a memory region, one per peer.

A place is lent again only after no write of its last peer can land there.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import partial

from millrace.core.errors import CapacityError, IntegrityError
from millrace.transfer.transport.base import PeerLostError, Transport
from millrace.transfer.writer import Writer


class Places:
    """Lends places to peers and takes them back. Thread-safe."""

    def __init__(self, transport: Transport, count: int, lease_s: float) -> None:
        """`lease_s`: after this time no write of an unreachable peer is in flight any more."""
        self._transport = transport
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._count = count
        self._free = list(range(count))
        self._leaving: dict[tuple[str, int], tuple[int, Writer]] = {}  # by peer and the peer's slot

    def take(self) -> int:
        """Returns a place that no peer can write to. Raises CapacityError when there is none."""
        with self._lock:
            self._sweep()
            if not self._free:
                raise CapacityError(
                    f"all {self._count} places of the exchange are taken, {len(self._leaving)} by "
                    "peers that may still write"
                )
            return self._free.pop(0)

    def give(self, place: int) -> None:
        """Takes a place back that no peer can write to."""
        with self._lock:
            self._free.append(place)

    def leave(self, place: int, peer: str, slot: int) -> None:
        """Takes a place back whose peer may still write; it stays taken until `drained`."""
        with self._lock:
            writer = Writer(peer=peer, renewed_s=time.monotonic())
            self._leaving[peer, slot] = place, writer

    def drained(self, peer: str, slot: int) -> None:
        """Notes that no write of the peer is in flight, and that none will follow."""
        with self._lock:
            if (left := self._leaving.get((peer, slot))) is not None:
                left[1].drained = True

    def watch(self, peer: str, slot: int, sent: Future[None]) -> None:
        """Watches `sent`, the sending of a notification to the leaving peer, for a lost peer."""
        sent.add_done_callback(partial(self._on_sent, (peer, slot)))

    def check_integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError when a place was lost, or with `idle` when one is lent."""
        with self._lock:
            self._sweep()
            known = [*self._free, *(place for place, _ in self._leaving.values())]
            if len(set(known)) != len(known) or not set(known) <= set(range(self._count)):
                raise IntegrityError(f"places of the exchange are free twice: {sorted(known)}")
            if idle and len(known) != self._count:
                raise IntegrityError(
                    f"{self._count - len(known)} places of the exchange are still lent"
                )

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for key, (place, writer) in list(self._leaving.items()):
            if not writer.drained and self._transport.is_dead(writer.peer):
                writer.lose(now_s, dead=True)
            if writer.quiet(now_s, self._lease_s):
                del self._leaving[key]
                self._free.append(place)

    def _on_sent(self, key: tuple[str, int], sent: Future[None]) -> None:
        """Notes a lost peer. Runs on the transport's thread."""
        if not sent.cancelled() and isinstance(sent.exception(), PeerLostError):
            with self._lock:
                if (left := self._leaving.get(key)) is not None:
                    left[1].lose(time.monotonic(), dead=False)
