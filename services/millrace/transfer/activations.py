"""Moves activations from one pipeline stage to the next (SPP, Mnemosyne section 4.3).

The sender and the receiver have the same number of slots. Each slot has room for the rows of one
pass. The sender writes a pass's rows out of its slot into the receiver's slot of the same number.
The notification carries the pass's description, and the rows too when there are few. The receiver
acknowledges the rows once it has taken them, and the slot is free again. So the sender runs ahead
of the receiver by at most as many passes as there are slots.

Over a `CheckedTransport` with sums, rows and acknowledgements that were altered on the way never
arrive. The transport tells so, and the chain of stages must end: the pass can't go on.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from millrace.core.errors import IntegrityError, TransferError
from millrace.transfer.transport.base import INLINE_BYTES, Transport
from millrace.transfer.transport.regions import Memory, TensorLike, host_bytes
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)

#: First bytes of notifications: to the receiver of rows, and to the sender of rows.
ROWS_CHANNEL, CREDIT_CHANNEL = 7, 8

#: The most passes that the sender may run ahead of the receiver.
SLOTS = 4

# channel u8, slot u8, rows u32, bytes of rows at the end u32, pass number u64, link u64
_HEADER = struct.Struct("<BBIIQQ")
_LOOK_S = 0.05  # between two checks whether the peer is dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Inlet:
    """The place at the receiver for a sender's rows: the control plane carries it to the sender.

    `link` is a number that the receiver never uses twice in its incarnation.
    """

    agent_metadata: bytes
    region: int
    slot_bytes: int
    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A pass whose rows lie in a slot. `take` frees the slot after the rows were read or copied."""

    number: int  # number of the pass in the link, from 0 on
    slot: int
    rows: int
    about: bytes  # the sender's description of the pass
    take: Callable[[], None]


class ActivationSender:
    """The end of the earlier stage. Only the computing thread may call `reserve` and `send`."""

    def __init__(
        self,
        transport: Transport,
        storage: TensorLike,
        row_bytes: int,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`storage` has shape [SLOTS, most rows, ...], is contiguous on the host and stays the
        caller's; a row has `row_bytes`. Rows of more than `inline_bytes` in total go by a write.
        """
        self._transport = transport
        memory = Memory.of_tensor(storage)
        self._region = transport.register(memory)
        self._bytes = host_bytes(memory)
        self._inline_bytes = inline_bytes
        self._slot_bytes = storage.numel() * storage.element_size() // SLOTS
        self._row_bytes = row_bytes
        self._changed = threading.Condition()
        self._free: list[int] = []
        self._inlet: Inlet | None = None
        self._peer = ""
        self._number = 0
        self._error: TransferError | None = None
        transport.subscribe(CREDIT_CHANNEL, self._credited)

    def open(self, inlet: Inlet, peer: str) -> None:
        """Sends to `peer` from now on; all slots are free. The transport is connected to the peer.

        Raises TransferError when the peer's slots are smaller than the slots here.
        """
        if inlet.slot_bytes < self._slot_bytes:
            raise TransferError(
                f"{peer} takes {inlet.slot_bytes} bytes of activations per pass, of which there "
                f"may be {self._slot_bytes}"
            )
        with self._changed:
            self._inlet, self._peer = inlet, peer
            self._free = list(range(SLOTS))
            self._number, self._error = 0, None

    def close(self, reason: str) -> None:
        """Stops sending: a caller that waits for a slot, or asks for a slot, gets TransferError."""
        with self._changed:
            self._error = self._error or TransferError(reason)
            self._changed.notify_all()

    def reserve(self, timeout_s: float) -> int:
        """Returns a slot to write rows into; waits while the receiver has freed none.

        Raises TransferError when the receiver is dead, has freed no slot for `timeout_s`, or is not
        connected.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._inlet is None:
                    raise TransferError("no next stage is connected to take activations")
                if self._free:
                    return self._free.pop()
                if self._transport.is_dead(self._peer):
                    raise TransferError(f"{self._peer} is gone")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TransferError(
                        f"{self._peer} has taken no activations for {timeout_s:g} s"
                    )
                self._changed.wait(min(left_s, _LOOK_S))

    def send(self, slot: int, rows: int, about: bytes) -> None:
        """Sends the first `rows` rows of a reserved slot; the receiver frees the slot.

        If the write fails, the next `reserve` raises the error.
        """
        inlet = self._inlet
        if inlet is None or rows * self._row_bytes > self._slot_bytes:
            raise TransferError(
                f"{rows} rows of {self._row_bytes} bytes fit no slot of the next stage"
            )
        nbytes, own = rows * self._row_bytes, slot * self._slot_bytes
        inline = nbytes if nbytes <= self._inline_bytes else 0
        header = _HEADER.pack(ROWS_CHANNEL, slot, rows, inline, self._number, inlet.link)
        self._number += 1
        if inline == nbytes:
            message = header + about + self._bytes[own : own + nbytes].tobytes()
            sent = self._transport.notify(self._peer, message, urgent=True)
        else:
            sent = self._transport.write(
                self._peer,
                Runs.of(own, slot * inlet.slot_bytes, nbytes),
                header + about,
                region=self._region,
                peer_region=inlet.region,
            )
        sent.add_done_callback(self._written)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a slot is lost or in use; call it when idle."""
        with self._changed:
            if self._inlet is not None and sorted(self._free) != list(range(SLOTS)):
                raise IntegrityError(f"of {SLOTS} slots for activations {self._free} are free")

    def _written(self, write: Future[None]) -> None:
        if not write.cancelled() and (error := write.exception()) is not None:
            self.close(f"{self._peer} did not get activations: {error}")

    def _credited(self, peer: str, payload: bytes) -> None:
        """Handles a credit of the receiver, on the transport's thread."""
        if len(payload) < _HEADER.size:  # altered on the way
            return
        _, slot, _, _, _, link = _HEADER.unpack_from(payload)
        with self._changed:
            inlet = self._inlet
            if inlet is None or link != inlet.link or peer != self._peer or slot in self._free:
                log.debug("a stale credit of %s", peer)
                return
            self._free.append(slot)
            self._changed.notify_all()


class ActivationReceiver:
    """The end of the later stage. The transport's thread calls `on_arrival` once per pass, in the
    order of sending; the callback must return at once.
    """

    def __init__(
        self,
        transport: Transport,
        storage: TensorLike,
        on_arrival: Callable[[Arrival], None],
    ) -> None:
        """`storage` has shape [SLOTS, most rows, ...], is contiguous on the host and stays the
        caller's.
        """
        self._transport = transport
        memory = Memory.of_tensor(storage)
        self._region = transport.register(memory)
        self._bytes = host_bytes(memory)
        self._slot_bytes = storage.numel() * storage.element_size() // SLOTS
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._links = 0
        self._peer = ""
        self._next = 0
        self._taken: set[int] = set()  # slots with rows that were not taken
        self._early: dict[int, Arrival] = {}  # passes by number that arrived before an earlier pass
        transport.subscribe(ROWS_CHANNEL, self._arrived)

    def inlet(self, metadata: bytes, peer: str) -> Inlet:
        """Opens a new link from the transport named `peer`; late passes of an earlier link are
        dropped. `metadata` is this transport's.
        """
        with self._lock:
            self._links += 1
            self._peer = peer
            self._next = 0
            self._taken.clear()
            self._early.clear()
            return Inlet(
                agent_metadata=metadata,
                region=self._region,
                slot_bytes=self._slot_bytes,
                link=self._links,
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError when rows lie in a slot; call it when idle."""
        with self._lock:
            if self._taken:
                raise IntegrityError(f"activations in slots {sorted(self._taken)} were not taken")

    def _arrived(self, peer: str, payload: bytes) -> None:
        if len(payload) < _HEADER.size:  # altered on the way
            return
        _, slot, rows, inline, number, link = _HEADER.unpack_from(payload)
        end = len(payload) - inline
        arrival = Arrival(
            number=number,
            slot=slot,
            rows=rows,
            about=payload[_HEADER.size : end],
            take=lambda: self._take(peer, slot, link),
        )
        with self._lock:
            is_ours = link == self._links and peer == self._peer
            fits = slot < SLOTS and inline <= self._slot_bytes and end >= _HEADER.size
            if not (is_ours and fits) or number < self._next or slot in self._taken:
                log.warning("dropped pass %d of link %d from %s", number, link, peer)
                return
            self._taken.add(slot)
            at = slot * self._slot_bytes
            self._bytes[at : at + inline] = np.frombuffer(payload, dtype=np.uint8, offset=end)
            self._early[number] = arrival  # writes may overtake each other
            ready = []
            while (following := self._early.pop(self._next, None)) is not None:
                ready.append(following)
                self._next += 1
        for following in ready:
            self._on_arrival(following)

    def _take(self, peer: str, slot: int, link: int) -> None:
        with self._lock:
            if link != self._links or slot not in self._taken:
                return
            self._taken.discard(slot)
        self._transport.notify(peer, _HEADER.pack(CREDIT_CHANNEL, slot, 0, 0, 0, link))
