"""A ring whose members are themselves groups of ranks.

The ring's transport reaches the memory of all ranks from rank 0, which alone has the real link.
Rank 0 tells the other ranks of arrivals and of an abort, so that all ranks make the same calls.
"""

from __future__ import annotations

from millrace.engine.attention.ring import RingLink
from millrace.engine.model.communicator import Communicator


class SharedLink:
    """The `RingLink` of each rank of a tensor-parallel group."""

    def __init__(self, ranks: Communicator, link: RingLink | None, rank: int, size: int) -> None:
        """`link`: rank 0's. `rank` and `size`: the group's place in the ring."""
        self._ranks = ranks
        self._link = link
        self.rank = rank
        self.size = size

    def history(self, layer: int) -> bool:
        return self._ranks.broadcast_flag(self._link is not None and self._link.history(layer))

    def publish(self, layer: int) -> None:
        self._ranks.meet()  # all have written their K/V
        if self._link is not None:
            self._link.publish(layer)

    def wait(self, step: int) -> bool:
        return self._ranks.broadcast_flag(self._link is not None and self._link.wait(step))

    def release(self, step: int) -> None:
        self._ranks.meet()  # all have read the block
        if self._link is not None:
            self._link.release(step)
