"""Decides which block a member may send round the ring at which moment. Pure, without I/O.

A ring has N members; member r sends to member r + 1. A layer takes N - 1 steps: at step s, a member
receives the block that began at member r - s. Blocks are numbered over the whole chunk: number
``layer * (N - 1) + step - 1``. The receiver and the sender use the same number for the same write.
A sender begins a layer with its own block, then forwards every arriving block except the last.

The steps of a layer use two buffers in turn, so that the attention's inputs lie in the same pages
in each layer. A member may send a block when the previous block in the same buffer has left it. A
block has left its buffer once it was attended to *and* forwarded; the receiver reports this by
cumulative credits.
"""

from __future__ import annotations

from millrace.core.kv.sp_layout import RING_BUFFERS, buffer_of


class RingOrder:
    """Numbers the blocks in a ring of `size` members."""

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ValueError(f"a ring has at least 2 members, not {size}")
        self.steps = size - 1

    def number(self, layer: int, step: int) -> int:
        """Returns the number of the block of a step (from 1 on) in the ring's `layer`-th layer
        (from 0 on).
        """
        return layer * self.steps + step - 1

    def step(self, number: int) -> int:
        """Returns the step in which a block arrives."""
        return number % self.steps + 1

    def is_forwarded(self, number: int) -> bool:
        """Returns whether the receiver forwards the block, as the block of the next number."""
        return self.step(number) < self.steps

    def freed_before(self, number: int) -> int:
        """Returns how many blocks must have left the receiver's buffers before this block may be
        sent.
        """
        step = self.step(number)
        if step > RING_BUFFERS:
            return number - RING_BUFFERS + 1
        layer = number // self.steps
        if not layer:
            return 0
        last = self.steps  # of the previous layer, in the same buffer
        if buffer_of(last) != buffer_of(step):
            last -= 1
        return self.number(layer - 1, last) + 1


class RingFlow:
    """One member's side of a chunk's ring. Each call reports an event or takes a permitted action.

    Raises ValueError for events that can't be: an unexpected block, a credit beyond the sent
    blocks.
    """

    def __init__(self, size: int) -> None:
        self.order = RingOrder(size)
        self._opened = False  # our buffers
        self._credited = -1  # the last credit that we gave
        self._credit = -1  # the last credit that we got; -1: the next member's buffers are closed
        self._published = 0  # blocks that the layers published here have to send
        self._sent = 0
        self._written: set[int] = set()
        self._arrived: set[int] = set()
        self._released: set[int] = set()
        self._left = 0  # blocks of ours that have left their buffers

    # -- what happened

    def open_buffers(self) -> None:
        """Opens our buffers, which nothing else uses any more: the previous member may send."""
        self._opened = True

    def publish(self) -> None:
        """Notes that the next layer's own block is ready."""
        self._published += self.order.steps

    def credit(self, count: int) -> None:
        """Takes the next member's report of how many blocks have left its buffers."""
        if count > self._sent:
            raise ValueError(f"a credit of {count} blocks, of which {self._sent} were sent")
        self._credit = max(self._credit, count)

    def arrived(self, number: int) -> None:
        """Notes that a block lies in its buffer."""
        if self._credited < self.order.freed_before(number) or number in self._arrived:
            raise ValueError(f"block {number} came unexpectedly")
        if number < self._left:
            raise ValueError(f"block {number} came twice")
        self._arrived.add(number)

    def released(self, number: int) -> None:
        """Notes that a block has been attended to."""
        self._released.add(number)
        self._move_on()

    def written(self, number: int) -> None:
        """Notes that a block that we sent lies at the next member."""
        if self.order.step(number) > 1:  # a block that came through our buffers
            self._written.add(number)
            self._move_on()

    # -- what may follow

    def has_arrived(self, number: int) -> bool:
        return number in self._arrived or number < self._left

    def next_send(self) -> int | None:
        """Takes the next block to send, if it may be sent."""
        number = self._sent
        if number >= self._published or self._credit < self.order.freed_before(number):
            return None
        if self.order.step(number) > 1 and not self.has_arrived(number - 1):
            return None
        self._sent += 1
        return number

    def next_credit(self) -> int | None:
        """Takes the credit to send to the previous member, if it is a new credit."""
        if not self._opened or self._left == self._credited:
            return None
        self._credited = self._left
        return self._credited

    @property
    def has_all_sent(self) -> bool:
        """Returns whether all published blocks, and the blocks to forward with them, were handed
        out.
        """
        return self._sent == self._published

    @property
    def has_all_received(self) -> bool:
        """Returns whether a block of every other member arrived for each layer published here."""
        return self._left + len(self._arrived) == self._published

    @property
    def is_open(self) -> bool:
        """Returns whether the previous member was sent the right to write into our buffers."""
        return self._credited >= 0

    @property
    def is_idle(self) -> bool:
        """Returns whether all published blocks went round: sent, received and released."""
        return self.has_all_sent and self._left == self._published

    def _move_on(self) -> None:
        while (number := self._left) in self._released and (
            not self.order.is_forwarded(number) or number + 1 in self._written
        ):
            self._left += 1
            self._arrived.discard(number)
            self._released.discard(number)
            self._written.discard(number + 1)
