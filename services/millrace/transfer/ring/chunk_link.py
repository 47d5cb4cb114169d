"""One chunk's ring as the compute of one member uses it: publish, wait, release."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Protocol

import numpy as np

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import (
    RING_BUFFERS,
    ChunkShares,
    buffer_memory,
    buffer_of,
    ring_buffers,
)
from millrace.transfer.ring.flow import RingFlow
from millrace.transfer.ring.page_runs import page_runs
from millrace.transfer.transport.runs import Offsets, Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A member's data for one request, as the other members of the group know it.

    ``peer``: the transport's name; ``region``: its pool's number there; ``pages``: the request's
    pages in the order of its layout; ``buffer_pages``: the pages lent to the ring, buffer after
    buffer.
    """

    instance_id: str
    peer: str
    region: int
    pages: tuple[int, ...]
    buffer_pages: tuple[int, ...]
    layout: KvLayout
    generation: int

    def buffer(self, number: int) -> Offsets:
        """Returns a buffer's flat pages, in the order in which a block fills them. int64.

        They count from the `KvLayout.buffer_offset` of the block's layer.
        """
        pages = ring_buffers(self.buffer_pages)[number]
        memory = buffer_memory(pages, self.layout.buffer_layers, self.layout.num_pages)
        return np.array(memory, dtype=np.int64)


@dataclass(slots=True)
class Waits:
    """Seconds that compute has waited in a chunk."""

    blocks_s: float = 0.0
    history_s: float = 0.0


class Group(Protocol):
    """The calls of the group's link that a chunk's link needs."""

    changed: Condition

    @property
    def is_aborted(self) -> bool: ...
    def history(self, layer: int) -> bool: ...
    def pump(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """A member's own blocks of one layer, step after step; its runs of forwarded blocks are
    computed once.
    """

    own: Runs
    forwarded: tuple[Runs, ...]

    def runs(self, step: int) -> Runs:
        return self.forwarded[step - 1] if step else self.own


class ChunkLink:
    """Sends a chunk's blocks round the ring; made by `GroupLink.chunk`. An
    `engine.attention.ring.RingLink` for one compute thread.

    `waits` counts the seconds that the thread waited; `is_broken`: one of its waits was ended by an
    abort, so the pass lacks blocks.
    """

    def __init__(
        self,
        group: Group,
        shares: ChunkShares,
        members: tuple[PeerInfo, ...],
        rank: int,
        after_device: Callable[[Callable[[], None]], None],
    ) -> None:
        """`members`: the members of the chunk's group, in order.

        Raises TransferError when the pages or buffers of a member are too few.
        """
        self.rank = rank
        self.size = len(members)
        self.waits = Waits()
        self.is_broken = False
        self.index = shares.chunk.index
        self.flow = RingFlow(self.size)
        self.me = members[rank]
        self.next = members[(rank + 1) % self.size]
        self.previous = members[rank - 1]
        self.begun = self.ended = False
        self._group = group
        self._shares = shares
        self._after_device = after_device
        self._layers = 0  # published layers, by compute's count
        self._sends: dict[int, _Layer] = {}  # published layers, as the device has reached them
        self._of_pass: _Layer | None = None  # layer 0 of the pass
        for member, share in zip(members, shares.shares, strict=True):
            _check(member, max(share.pages, default=-1) + 1, shares.block_pages())
        self._buffers = [
            [member.buffer(number) for number in range(RING_BUFFERS)]
            for member in (self.me, self.next)
        ]

    # -- for compute

    def begin_pass(self, index: int) -> None:
        """Opens a pass of the chunk: from here on its blocks go round. Call it before each pass.

        The first pass opens this member's buffers to the previous member, so all earlier chunks
        must be over here.
        """
        filled = self._shares.passes[index].filled
        runs = [
            self._block_runs(step, filled[(self.rank - step) % self.size])
            for step in range(self.size - 1)
        ]
        self._of_pass = _Layer(runs[0], tuple(runs[1:]))
        if not self.begun:
            with self._group.changed:
                self.begun = True
            self._group.pump()

    def history(self, layer: int) -> bool:
        """Waits until all history that others give of a layer has arrived. Returns False when
        aborted.
        """
        started_s = time.monotonic()
        came = self._group.history(layer)
        self.waits.history_s += time.monotonic() - started_s
        self.is_broken |= not came
        return came

    def publish(self, layer: int) -> None:
        """Sends this member's block of the layer once the device gets here: then it lies in its
        pages.
        """
        if self._of_pass is None:
            raise ValueError(f"layer {layer} is published before a pass has begun")
        self._after_device(partial(self._ready, self._layers, self._at_layer(self._of_pass, layer)))
        self._layers += 1

    def wait(self, step: int) -> bool:
        """Waits until the block of a step (1 to size - 1) has arrived. Returns False when
        aborted.
        """
        number = self._number(step)
        started_s = time.monotonic()
        with self._group.changed:
            self._group.changed.wait_for(
                lambda: self._group.is_aborted or self.flow.has_arrived(number)
            )
            came = not self._group.is_aborted
        self.waits.blocks_s += time.monotonic() - started_s
        self.is_broken |= not came
        return came

    def release(self, step: int) -> None:
        """Frees the step's buffer once the device gets here."""
        self._after_device(partial(self._released, self._number(step)))

    def end(self) -> None:
        """Ends the chunk: all of it is computed here, and the device has ended its work."""
        with self._group.changed:
            self.ended = True
        self._group.pump()

    # -- for the group, under its lock

    def next_send(self) -> tuple[int, Runs] | None:
        """Takes the next block that may be sent; returns its number and the runs to write."""
        number = self.flow.next_send()
        if number is None:
            return None
        layer, step = divmod(number, self.size - 1)
        sends = self._sends[layer]
        if step == self.size - 2:
            del self._sends[layer]
        return number, sends.runs(step)

    @property
    def may_be_written(self) -> bool:
        """Returns whether the previous member may be writing into our buffers for this chunk."""
        return self.flow.is_open and not (self.ended and self.flow.has_all_received)

    # -- inside

    def _block_runs(self, step: int, slots: int) -> Runs:
        """Returns the runs of a step's block in layer 0, from its place here to its next buffer."""
        count = ceil_div(slots, self.me.layout.page_tokens)
        if step:
            source = self._buffers[0][buffer_of(step)]
        else:
            numbers = self._shares.shares[self.rank].pages[:count]
            source = np.array([self.me.pages[number] for number in numbers], dtype=np.int64)
        target = self._buffers[1][buffer_of(step + 1)]
        return page_runs(self.me.layout, source[:count], self.next.layout, target[:count])

    def _at_layer(self, first: _Layer, layer: int) -> _Layer:
        """Returns the runs of the model's `layer`, given those of layer 0."""
        here, there = (member.layout.buffer_offset(layer) for member in (self.me, self.next))
        own = first.own.shifted(self.me.layout.layer_offset(layer), there)
        if not (here or there):
            return _Layer(own, first.forwarded)
        return _Layer(own, tuple(runs.shifted(here, there) for runs in first.forwarded))

    def _number(self, step: int) -> int:
        return self.flow.order.number(self._layers - 1, step)

    def _ready(self, count: int, layer: _Layer) -> None:
        with self._group.changed:
            self._sends[count] = layer
            self.flow.publish()
        self._group.pump()

    def _released(self, number: int) -> None:
        with self._group.changed:
            self.flow.released(number)
        self._group.pump()


def _check(member: PeerInfo, pages: int, block_pages: int) -> None:
    if pages > len(member.pages):
        raise TransferError(
            f"{member.instance_id} has {len(member.pages)} pages of the request; its share of the "
            f"chunk needs {pages}"
        )
    room = len(member.buffer_pages) // RING_BUFFERS * member.layout.buffer_layers
    if block_pages > room:
        raise TransferError(
            f"the ring's buffers at {member.instance_id} hold {room} pages each; the largest "
            f"block has {block_pages}"
        )
