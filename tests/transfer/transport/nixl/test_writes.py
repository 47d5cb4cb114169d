"""Writes of `NixlTransport` whose bytes others copy, while a copy is under way."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import PeerLostError
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S
from support.host_copies import HostCopies

SIZE = 4096
_numbers = itertools.count()


class Pair:
    """A sender, and a receiver that listens, with their copies."""

    def __init__(self) -> None:
        self.copies = HostCopies()
        self.source, self.target = (np.full(SIZE, value, dtype=np.uint8) for value in (5, 0))
        self.inbox: queue.Queue[bytes] = queue.Queue()
        number = next(_numbers)
        self.sender = NixlTransport(f"copies-from-{number}", self.copies)
        self.receiver = NixlTransport(f"copies-to-{number}", self.copies)
        self.sender.register(Memory.of_array(self.source))
        self.receiver.register(Memory.of_array(self.target))
        self.receiver.subscribe(7, lambda peer, payload: self.inbox.put(payload))
        self.peer = self.sender.connect(self.receiver.metadata()).result(HANG_S)

    def write(self, notification: bytes = b"\x07here") -> Future[None]:
        return self.sender.write(self.peer, Runs.of(0, 0, SIZE), notification)

    def held(self, notification: bytes = b"\x07here") -> Future[None]:
        """Returns a write whose copy has begun and does not end while the gate is closed."""
        self.copies.gate.clear()
        write = self.write(notification)
        while self.copies.begun.empty():
            self.sender.progress()
        return write


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    with made.receiver.listening():
        yield made
        made.copies.gate.set()
        made.sender.close()
    made.receiver.close()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_future_and_notification_wait_for_the_end_of_the_copy(pair):
    write = pair.held()
    pair.sender.notify(pair.peer, b"\x07another").result(HANG_S)  # the thread is not held up
    assert pair.inbox.get(timeout=HANG_S) == b"\x07another"
    assert not write.done() and not write.cancel() and not pair.target.any()
    pair.copies.gate.set()
    write.result(HANG_S)
    assert pair.inbox.get(timeout=HANG_S) == b"\x07here" and (pair.target == 5).all()
    assert pair.inbox.empty()


@pytest.mark.parametrize("end", ["disconnect", "close"])
def test_a_write_that_is_given_up_ends_when_the_source_is_no_longer_read(pair, end):
    write = pair.held()
    leave = {
        "disconnect": lambda: pair.sender.disconnect(pair.peer).result(HANG_S),
        "close": pair.sender.close,
    }[end]
    leaving = in_thread(leave)
    assert pair.copies.awaited.wait(HANG_S)
    assert leaving.is_alive() and not write.done()
    pair.copies.gate.set()
    leaving.join(HANG_S)
    with pytest.raises(PeerLostError):
        write.result(HANG_S)
    assert pair.inbox.empty()


def test_a_receiver_closes_when_no_copy_reaches_its_memory(pair):
    write = pair.held(b"")
    closing = in_thread(pair.receiver.close)
    assert pair.copies.awaited.wait(HANG_S)
    assert closing.is_alive() and not write.done()
    pair.copies.gate.set()
    closing.join(HANG_S)
    write.result(HANG_S)
    with pytest.raises(PeerLostError):
        pair.write().result(HANG_S)
    assert pair.copies.begun.qsize() == 1


def test_a_peer_that_closes_before_its_copy_is_lost(pair, monkeypatch):
    monkeypatch.setattr(pair.copies, "serves", lambda *ends: True)
    pair.copies.open.discard(pair.peer)
    with pytest.raises(PeerLostError, match="is closed"):
        pair.write().result(HANG_S)
    assert not pair.target.any()


def test_a_copy_that_fails_fails_its_write_alone(pair):
    pair.copies.error = RuntimeError("the device has no memory")
    with pytest.raises(TransferError, match=r"write to .*: the device has no memory"):
        pair.write().result(HANG_S)
    pair.copies.error = None
    pair.write().result(HANG_S)
    assert (pair.target == 5).all() and pair.inbox.get(timeout=HANG_S) == b"\x07here"


def test_an_event_that_fails_fails_its_write_and_is_given_up(pair, monkeypatch, caplog):
    def broken() -> bool:
        raise RuntimeError("the device is broken")

    write = pair.held()
    event = pair.copies.begun.get()
    monkeypatch.setattr(event, "synchronize", broken)
    monkeypatch.setattr(event, "query", broken)
    with pytest.raises(TransferError, match=r"write to .* failed: the device is broken"):
        write.result(HANG_S)
    assert "ended with an error: the device is broken" in caplog.text
    monkeypatch.undo()
    assert pair.inbox.empty()


def test_peers_whose_memory_is_not_served_are_written_by_nixl(pair):
    pair.copies.open.clear()
    pair.write().result(HANG_S)
    assert (pair.target == 5).all() and pair.inbox.get(timeout=HANG_S) == b"\x07here"
    assert pair.copies.begun.empty()
