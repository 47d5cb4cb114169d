"""Keeps pages of a failed link taken while any peer may still write to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from millrace.transfer.ring.messages import RingMessage
from millrace.transfer.transport.base import PeerLostError, Transport
from millrace.transfer.writer import Writer

#: Seconds after which a peer that has not answered is asked again.
ASK_AGAIN_S = 1.0


class Quarantine:
    """Tracks the possible writers of an aborted link. `abort` is the message that asks them to
    drain.
    """

    def __init__(
        self,
        transport: Transport,
        abort: RingMessage,
        writers: Mapping[str, float],
        lease_s: float,
    ) -> None:
        """`writers`: transports' names, with the time of the last message to each
        (time.monotonic).
        """
        self._transport = transport
        self._abort = abort.encode()
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._writers = {
            peer: Writer(peer=peer, renewed_s=sent_s) for peer, sent_s in writers.items()
        }
        self._asked_s = time.monotonic()

    def ask(self, peers: Iterable[str]) -> None:
        """Sends the abort, also to peers that can't be writing. The caller must hold no lock."""
        for peer in peers:
            sent = self._transport.notify(peer, self._abort)
            sent.add_done_callback(partial(self._on_sent, peer))

    def drained(self, peer: str) -> None:
        with self._lock:
            if peer in self._writers:
                self._writers[peer].drained = True

    def check(self) -> None:
        """Finds writers that have ended, and asks the others again."""
        now_s = time.monotonic()
        with self._lock:
            open_ = [w for w in self._writers.values() if not w.drained]
            for writer in open_:
                if self._transport.is_dead(writer.peer):
                    writer.lose(now_s, dead=True)
            again = now_s - self._asked_s > ASK_AGAIN_S
            if again:
                self._asked_s = now_s
        if again:
            self.ask([writer.peer for writer in open_ if not writer.dead])

    def is_over(self) -> bool:
        """Returns whether nothing can land here any more."""
        now_s = time.monotonic()
        with self._lock:
            return all(writer.quiet(now_s, self._lease_s) for writer in self._writers.values())

    def _on_sent(self, peer: str, sent: Future[None]) -> None:
        """Notes a lost writer. Runs on the transport's thread."""
        if not sent.cancelled() and isinstance(sent.exception(), PeerLostError):
            with self._lock:
                if peer in self._writers:
                    self._writers[peer].lose(time.monotonic(), dead=False)
