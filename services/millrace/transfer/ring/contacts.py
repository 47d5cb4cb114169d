"""Records when a link last heard from each peer and last sent to it.

A member writes to a peer only within `lease_s` seconds of the peer's last message. A peer that has
waited for a member for longer than `lease_s` may free its pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator


class Contacts:
    """The times of each peer's last message and of the last message to it, by transport name.

    The link's lock guards it.
    """

    def __init__(self, peers: Iterable[str], lease_s: float) -> None:
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

    def sent(self, peer: str) -> None:
        self._sent_s[peer] = time.monotonic()

    def heard_s(self, peer: str) -> float:
        """Returns when the peer was last heard of, in seconds of time.monotonic."""
        return self._heard_s[peer]

    def sent_s(self, peer: str) -> float:
        """Returns when the peer was last sent a message, in seconds of time.monotonic."""
        return self._sent_s[peer]

    def may_write(self, peer: str) -> bool:
        """Returns whether the peer was heard of within `lease_s`."""
        return time.monotonic() - self._heard_s[peer] <= self._lease_s

    def is_to_ask(self, peer: str) -> bool:
        """Returns True once per message of the peer: the caller then asks whether it may still
        write.
        """
        if peer in self._asked:
            return False
        self._asked.add(peer)
        return True
