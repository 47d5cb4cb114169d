"""Decides which member of an SP group gives which history to which other member. Pure.

A giver sends OFFER, the receiver answers WANT, and the giver writes the history once it has
computed it. A giver that has sent OFFER is linked to the receiver: after WANT it may write, and it
can report that it will write no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millrace.core.kv.sp_layout import Move
from millrace.transfer.ring.chunk_link import PeerInfo
from millrace.transfer.ring.history import History, LayerArrivals
from millrace.transfer.ring.messages import KEPT
from millrace.transfer.ring.page_runs import page_runs

#: A peer, by the transport's name, and the chunk before which the history is given.
_Given = tuple[str, int]


class Giving:
    """The history that this member receives and gives."""

    def __init__(self, layers: range) -> None:
        """`layers`: the model's layers on this instance."""
        self.arrivals = LayerArrivals(layers)
        self._offered: set[_Given] = set()
        self._called: set[_Given] = set()  # offers that were answered by WANT
        self._wanted: set[_Given] = set()  # by peers
        self._to_give: dict[_Given, History] = {}

    # -- as a receiver

    def offered(self, peer: str, chunk: int) -> None:
        """Notes that a peer will give history."""
        self._offered.add((peer, chunk))

    def next_calls(self) -> list[_Given]:
        """Takes the offers that this member waits for; the caller sends WANT to each peer."""
        calls = sorted(self._offered & self.arrivals.missing())
        self._offered.difference_update(calls)
        self._called.update(calls)
        return calls

    def writers(self) -> set[str]:
        """Returns the peers that may be writing here; decode may write from the moment it was
        asked.
        """
        missing = self.arrivals.missing()
        return {one for one, chunk in missing if chunk == KEPT or (one, chunk) in self._called}

    # -- as a giver

    def wanted(self, peer: str, chunk: int) -> None:
        """Notes that a peer may be written to."""
        self._wanted.add((peer, chunk))

    def give(self, chunk: int, history: History) -> None:
        """Notes the history that peers get before a chunk is computed."""
        self._to_give[history.peer, chunk] = history

    def next_gifts(self) -> list[tuple[int, History]]:
        """Takes the histories that are computed and wanted, each with its chunk."""
        ready = sorted(self._wanted & self._to_give.keys())
        self._wanted.difference_update(ready)
        return [(given[1], self._to_give.pop(given)) for given in ready]

    @property
    def is_over(self) -> bool:
        """Returns whether all history has come, and nothing is left to give."""
        return not self._to_give and not self.arrivals.missing()


def history_of(moves: Sequence[Move], giver: PeerInfo, receiver: PeerInfo) -> History:
    """Returns the giver's writes to the receiver for these moves of pages."""
    source, target = (
        np.array([pages[number] for numbers in some for number in numbers], dtype=np.int64)
        for pages, some in (
            (giver.pages, [move.source for move in moves]),
            (receiver.pages, [move.target for move in moves]),
        )
    )
    return History(
        peer=receiver.peer,
        runs=page_runs(giver.layout, source, receiver.layout, target),
        layout=giver.layout,
        peer_layout=receiver.layout,
        region=giver.region,
        peer_region=receiver.region,
    )
