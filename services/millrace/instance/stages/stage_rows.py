"""Sends rows between stages: implements `engine.pipeline.rows` with `transfer.activations`."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from millrace.engine.pipeline.in_flight import StageError
from millrace.engine.pipeline.rows import Handed
from millrace.transfer.activations import SLOTS, ActivationReceiver, ActivationSender, Arrival
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.nixl.transport import NixlTransport

_NUMBER = struct.Struct("<Q")


def transport_of_rows(
    name: str, *, checksums: bool, on_corrupt: Callable[[StageError], object]
) -> CheckedTransport:
    """Opens a stage's transport (`transfer.kv_checksum`). `on_corrupt` gets the error of rows or of
    an acknowledgement that came with another sum, on the transport's thread.
    """

    def corrupt(peer: str) -> None:
        on_corrupt(StageError(f"activations of {peer} came with another checksum than was sent"))

    return CheckedTransport(NixlTransport(name), checks=checksums, on_corrupt=corrupt)


def room_for_rows(max_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Allocates [SLOTS, max_rows, hidden] on the host, one slot per pass in flight."""
    return torch.zeros(SLOTS, max_rows, hidden, dtype=dtype)


class OutgoingRows:
    """A `RowsOut` over the transport, through memory on the host. ``sender`` must be opened before
    the first pass."""

    def __init__(self, transport: Transport, room: Tensor, timeout_s: float) -> None:
        """room: of `room_for_rows`."""
        self._room = room
        self._timeout_s = timeout_s
        self.sender = ActivationSender(transport, room, room.shape[2] * room.element_size())

    def send(self, number: int, summands: tuple[Tensor, Tensor]) -> None:
        x, residual = summands
        slot = self.sender.reserve(self._timeout_s)
        rows = self._room[slot, : len(x)]
        if x.device == rows.device:
            torch.add(x, residual, out=rows)
        else:
            rows.copy_(x + residual)
        self.sender.send(slot, len(x), _NUMBER.pack(number))


class IncomingRows:
    """Passes rows on as they arrive. ``receiver`` makes the inlet for the previous stage."""

    def __init__(
        self, transport: Transport, room: Tensor, on_rows: Callable[[Handed], None]
    ) -> None:
        """room: of `room_for_rows`; `on_rows` is called on the transport's thread."""
        self._room = room
        self._on_rows = on_rows
        self.receiver = ActivationReceiver(transport, room, self._arrived)

    def _arrived(self, arrival: Arrival) -> None:
        (number,) = _NUMBER.unpack(arrival.about)
        self._on_rows(Handed(number, self._room[arrival.slot, : arrival.rows], arrival.take))
