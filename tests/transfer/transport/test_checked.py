"""Messages and writes with sums: what came otherwise than it was sent is no message."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from millrace.core.errors import TransferError
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S
from support.faulty_transport import FaultyTransport
from support.memory_transport import MemoryHub, MemoryTransport

DATA, OTHER, SUMMED = 7, 8, 9
SIZE = 1 << 16
SCATTERED = Runs(*(np.array(column, dtype=np.int64) for column in ([0, 900], [64, 8000], [100, 3])))


class End:
    """A checked transport over one that lies on demand, with one region, and what it heard."""

    def __init__(self, name: str, hub: MemoryHub, *, checks: bool, fault: str = "") -> None:
        self.net = FaultyTransport(
            MemoryTransport(name, hub), 3, faults=(fault,), probability=1.0 if fault else 0.0
        )
        self.corrupt: list[str] = []
        self.transport = CheckedTransport(
            self.net, checks=checks, summed=(SUMMED,), on_corrupt=self.corrupt.append
        )
        self.bytes = np.arange(SIZE, dtype=np.uint8)
        self.transport.register(Memory.of_array(self.bytes))
        self.heard: list[tuple[int, bytes]] = []
        for channel in (DATA, OTHER, SUMMED):
            self.transport.subscribe(channel, lambda _, p, at=channel: self.heard.append((at, p)))


class Recording(MemoryTransport):
    """Keeps the messages of writes, and writes nothing."""

    def __init__(self, name: str, hub: MemoryHub) -> None:
        super().__init__(name, hub)
        self.messages: list[bytes] = []

    def write(self, peer: str, runs: Runs, notification: bytes, **_) -> Future[None]:
        self.messages.append(notification)
        return Future()


class Pair:
    def __init__(self, *, fault: str = "", sender: bool = True, receiver: bool = True) -> None:
        hub = MemoryHub()
        self.sender = End("sender", hub, checks=sender, fault=fault)
        self.receiver = End("receiver", hub, checks=receiver)
        self.receiver.bytes[:] = 0
        self.sender.transport.connect(self.receiver.transport.metadata()).result(HANG_S)

    def write(self, message: bytes, runs: Runs = SCATTERED, **regions: int) -> None:
        sent = self.sender.transport.write("receiver", runs, message, **regions)
        sent.result(HANG_S)

    def notify(self, message: bytes) -> None:
        self.sender.transport.notify("receiver", message).result(HANG_S)

    def close(self) -> None:
        self.sender.transport.close()
        self.receiver.transport.close()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("sender", [True, False])
@pytest.mark.parametrize("receiver", [True, False])
def test_sound_messages_pass_whoever_checks(pairs, sender: bool, receiver: bool) -> None:
    pairs.append(pair := Pair(sender=sender, receiver=receiver))
    pair.write(b"\x07written")
    pair.notify(b"\x08said")
    pair.write(b"\x09with sums of its own")
    assert pair.receiver.heard == [
        (DATA, b"\x07written"),
        (OTHER, b"\x08said"),
        (SUMMED, b"\x09with sums of its own"),
    ]
    assert (pair.receiver.bytes[64:164] == pair.sender.bytes[:100]).all()
    assert not pair.receiver.corrupt


@pytest.mark.parametrize("fault", ["corrupt", "truncate"])
def test_written_bytes_that_differ_make_no_message_of_their_channel(pairs, fault: str) -> None:
    pairs.append(pair := Pair(fault=fault))
    pair.write(b"\x07written")
    assert pair.receiver.heard == [(DATA, b"\x07")]
    assert pair.receiver.corrupt == ["sender"]


@pytest.mark.parametrize("fault", ["corrupt", "truncate"])
def test_a_message_that_differs_is_of_any_channel(pairs, fault: str) -> None:
    pairs.append(pair := Pair(fault=fault))
    for number in range(20):
        pair.notify(b"\x07said %d" % number)
    assert pair.receiver.heard == [(at, bytes([at])) for at in (DATA, OTHER, SUMMED)] * 20
    assert pair.receiver.corrupt == ["sender"] * 20


def test_bytes_are_summed_once(pairs) -> None:
    """A channel with sums of its own finds the fault itself; its messages are still sealed."""
    pairs.append(pair := Pair(fault="corrupt"))
    pair.write(b"\x09with sums of its own")
    assert pair.receiver.heard == [(SUMMED, b"\x09with sums of its own")]
    assert not pair.receiver.corrupt


def test_who_checks_nothing_takes_what_comes(pairs) -> None:
    pairs.append(pair := Pair(fault="corrupt", receiver=False))
    pair.write(b"\x07written")
    assert pair.receiver.heard == [(DATA, b"\x07written")]


@pytest.mark.parametrize(
    ("runs", "regions"),
    [
        (Runs.of(SIZE - 1, 0, 2), {}),
        (Runs.of(0, SIZE - 1, 2), {}),
        (SCATTERED, {"region": 4}),
        (SCATTERED, {"peer_region": 4}),
    ],
)
def test_a_write_that_leaves_a_region_is_refused_as_ever(pairs, runs: Runs, regions) -> None:
    pairs.append(pair := Pair())
    with pytest.raises(TransferError):
        pair.write(b"\x07written", runs, **regions)
    assert not pair.receiver.heard


def test_a_seal_about_bytes_that_are_not_here_is_none(pairs) -> None:
    """As a peer of another version, or an enemy, could send."""
    pairs.append(pair := Pair())
    recorded = Recording("recorded", MemoryHub())
    other = CheckedTransport(recorded, checks=True)
    other.register(Memory.of_array(np.zeros(SIZE, dtype=np.uint8)))
    for runs, region in (
        (Runs.of(0, SIZE, 4), 0),
        (Runs.of(0, 0, 4), 1),
        (Runs.of(0, 2**63 - 2, 4), 0),
    ):
        other.write("receiver", runs, b"\x07far", peer_region=region)
    for sealed in recorded.messages:
        pair.sender.net.notify("receiver", sealed).result(HANG_S)
    other.close()
    bare = [(at, bytes([at])) for at in (DATA, OTHER, SUMMED)]
    assert pair.receiver.heard == [*[(DATA, b"\x07")] * 2, *bare]
    assert pair.receiver.corrupt == ["sender"] * 3


def test_device_memory_is_refused_only_where_sums_are_made() -> None:
    hub = MemoryHub()
    vram = Memory(4096, 64, device=0)
    checked = CheckedTransport(MemoryTransport("on", hub), checks=True)
    with pytest.raises(ValueError, match="on the host"):
        checked.register(vram)
    plain = CheckedTransport(MemoryTransport("off", hub), checks=False)
    assert plain.register(vram) == 0
    checked.close()
    plain.close()
