"""Activations between stages: in order, whole, never further ahead than there are slots."""

from __future__ import annotations

import itertools
import queue
import threading
from itertools import product

import pytest
import torch

from millrace.core.errors import IntegrityError, TransferError
from millrace.transfer.activations import (
    SLOTS,
    ActivationReceiver,
    ActivationSender,
    Arrival,
)
from millrace.transfer.transport.base import INLINE_BYTES
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.nixl.transport import NixlTransport
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport

ROWS, HIDDEN = 8, 6
_numbers = itertools.count()


class Pair:
    """Two connected ends, their slots, and the arrivals."""

    def __init__(
        self,
        kind: str,
        receiver_rows: int = ROWS,
        inline_bytes: int = INLINE_BYTES,
        checks: bool = False,
    ) -> None:
        hub = MemoryHub()
        names = [f"stage-{next(_numbers)}" for _ in range(2)]
        self.bare: list[MemoryTransport | NixlTransport] = [
            MemoryTransport(name, hub) if kind == "memory" else NixlTransport(name)
            for name in names
        ]
        #: The peers of whom an end has got altered data.
        self.corrupt: queue.Queue[str] = queue.Queue()
        self.ends = [
            CheckedTransport(one, checks=checks, on_corrupt=self.corrupt.put) for one in self.bare
        ]
        self.out = torch.zeros(SLOTS, ROWS, HIDDEN)
        self.into = torch.zeros(SLOTS, receiver_rows, HIDDEN)
        self.arrivals: queue.Queue[Arrival] = queue.Queue()
        self.sender = ActivationSender(self.ends[0], self.out, 4 * HIDDEN, inline_bytes)
        self.receiver = ActivationReceiver(self.ends[1], self.into, self.arrivals.put)
        self.listening = [end.listening() for end in self.ends]
        for one in self.listening:
            one.__enter__()

    def open(self) -> None:
        metadata = [end.metadata() for end in self.ends]
        peer = self.ends[0].connect(metadata[1]).result(HANG_S)
        self.ends[1].connect(metadata[0]).result(HANG_S)
        self.sender.open(self.receiver.inlet(metadata[1], self.ends[0].name), peer)

    def send(self, value: float, rows: int = ROWS) -> None:
        slot = self.sender.reserve(HANG_S)
        self.out[slot, :rows] = value
        self.sender.send(slot, rows, f"{value}".encode())

    def next(self) -> Arrival:
        return self.arrivals.get(timeout=HANG_S)

    def close(self) -> None:
        for one in self.listening:
            one.__exit__(None, None, None)
        for end in self.ends:
            end.close()


@pytest.fixture(params=product(["memory", "nixl"], [0, ROWS * HIDDEN * 2, INLINE_BYTES]))
def pair(request):
    """Rows go by a write when they are many, else in notifications."""
    kind, inline_bytes = request.param
    found = Pair(kind, inline_bytes=inline_bytes)
    found.open()
    yield found
    found.close()


def test_passes_arrive_whole_and_in_order(pair) -> None:
    def passes() -> None:
        for value in range(1, 41):
            pair.send(float(value), rows=value % (ROWS + 1))

    thread = threading.Thread(target=passes)
    thread.start()
    for value in range(1, 41):
        arrival = pair.next()
        rows = value % (ROWS + 1)
        assert (arrival.number, arrival.rows) == (value - 1, rows)
        assert arrival.about == f"{float(value)}".encode()
        assert torch.equal(pair.into[arrival.slot, :rows], torch.full((rows, HIDDEN), float(value)))
        arrival.take()
    thread.join(HANG_S)
    pair.receiver.check_integrity()
    assert {pair.sender.reserve(HANG_S) for _ in range(SLOTS)} == set(range(SLOTS))  # all are back


def test_the_sender_waits_for_slots_and_no_longer_than_it_may(pair) -> None:
    for value in range(SLOTS):
        pair.send(float(value))
    with pytest.raises(TransferError, match=r"has taken no activations for 0\.2 s"):
        pair.sender.reserve(0.2)
    with pytest.raises(IntegrityError, match="slots for activations"):
        pair.sender.check_integrity()
    first = pair.next()
    with pytest.raises(IntegrityError, match="were not taken"):
        pair.receiver.check_integrity()
    first.take()
    assert pair.sender.reserve(HANG_S) == first.slot


def test_a_new_link_begins_anew_and_drops_what_the_old_one_left(pair) -> None:
    pair.send(1.0)
    old = pair.next()
    pair.open()
    old.take()  # of the earlier link: frees nothing of this link
    pair.sender.check_integrity()
    pair.send(2.0)
    arrival = pair.next()
    assert (arrival.number, arrival.about) == (0, b"2.0")


def test_a_closed_sender_says_why() -> None:
    pair = Pair("memory")
    with pytest.raises(TransferError, match="no next stage is connected"):
        pair.sender.reserve(0.1)
    pair.open()
    pair.sender.close("stage 2 died")
    with pytest.raises(TransferError, match="stage 2 died"):
        pair.sender.reserve(0.1)
    pair.close()


def test_a_dead_receiver_is_noticed() -> None:
    pair = Pair("memory")
    pair.open()
    for value in range(SLOTS):
        pair.send(float(value))
    pair.ends[1].close()
    with pytest.raises(TransferError, match="is gone"):
        pair.sender.reserve(HANG_S)
    pair.close()


def test_smaller_slots_at_the_receiver_are_refused() -> None:
    pair = Pair("memory", receiver_rows=ROWS - 1)
    with pytest.raises(TransferError, match="bytes of activations per pass"):
        pair.open()
    pair.close()


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("inline_bytes", [0, INLINE_BYTES], ids=["written", "in the message"])
@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_altered_rows_are_told_and_never_arrive(kind, inline_bytes, monkeypatch) -> None:
    pair = Pair(kind, inline_bytes=inline_bytes, checks=True)
    pair.open()
    try:
        pair.send(1.0)
        arrival = pair.next()
        assert torch.equal(pair.into[arrival.slot], torch.full((ROWS, HIDDEN), 1.0))
        arrival.take()
        if inline_bytes:
            notify = pair.bare[0].notify
            monkeypatch.setattr(
                pair.bare[0],
                "notify",
                lambda peer, payload, **more: notify(peer, altered(payload), **more),
            )
        else:
            write = pair.bare[0].write

            def write_altered(peer, runs, *message, **more):
                pair.out.view(torch.uint8).view(-1)[int(runs.source[0])] ^= 1
                return write(peer, runs, *message, **more)

            monkeypatch.setattr(pair.bare[0], "write", write_altered)
        pair.send(2.0)
        assert pair.corrupt.get(timeout=HANG_S) == pair.ends[0].name
        assert pair.arrivals.empty()
    finally:
        pair.close()


@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_an_altered_acknowledgement_is_told(kind, monkeypatch) -> None:
    pair = Pair(kind, checks=True)
    pair.open()
    try:
        pair.send(1.0)
        notify = pair.bare[1].notify
        monkeypatch.setattr(
            pair.bare[1],
            "notify",
            lambda peer, payload, **more: notify(peer, altered(payload), **more),
        )
        pair.next().take()
        assert pair.corrupt.get(timeout=HANG_S) == pair.ends[1].name
        with pytest.raises(IntegrityError, match="slots for activations"):
            pair.sender.check_integrity()
    finally:
        pair.close()
