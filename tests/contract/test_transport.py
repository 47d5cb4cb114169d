"""What every Transport promises, on all implementations; NIXL's also between two processes.

"copied-nixl": NIXL's, with copies by another for the bytes of its writes, as on a GPU.
"""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np
import pytest

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import PeerLostError, Transport
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.joined import JoinedTransport
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S
from support.host_copies import HostCopies
from support.memory_transport import MemoryHub, MemoryTransport
from support.transfer_peers import Child, ChildPipe

SIZE = 1 << 20
KINDS = ["memory", "nixl", "copied-nixl", "ranked-memory", "ranked-nixl", "checked-memory"]
_numbers = itertools.count()


def runs(*triples):
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*triples, strict=True)))


class End:
    """A transport with one region and a queue of what it was told."""

    def __init__(self, transport: Transport, size: int = SIZE) -> None:
        self.transport = transport
        self.bytes = np.zeros(size, dtype=np.uint8)
        self.inbox: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.region = transport.register(Memory.of_array(self.bytes))
        transport.subscribe(7, lambda peer, payload: self.inbox.put((peer, payload)))


@pytest.fixture(params=KINDS)
def make(request):
    """Makes ends that can reach each other, and closes them.

    A ranked end has another rank with a pool, but its one region is rank 0's alone.
    """
    hub = MemoryHub()
    ends = []
    over, _, kind = request.param.rpartition("-")
    copies = HostCopies(late=3) if over == "copied" else None

    def agent(name: str) -> Transport:
        return MemoryTransport(name, hub) if kind == "memory" else NixlTransport(name, copies)

    def build(size: int = SIZE) -> End:
        name = f"end-{next(_numbers)}"
        transport = agent(name)
        if over == "ranked":
            transport = JoinedTransport(transport, [agent(f"{name}-1")])
        elif over == "checked":
            transport = CheckedTransport(transport, checks=True)
        ends.append(End(transport, size))
        return ends[-1]

    yield build
    for end in ends:
        end.transport.close()


@pytest.fixture
def pair(make):
    """A sender connected to a receiver that listens."""
    sender, receiver = make(), make()
    peer = sender.transport.connect(receiver.transport.metadata()).result(HANG_S)
    assert peer == receiver.transport.name
    sender.bytes[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    with receiver.transport.listening():
        yield sender, receiver


def send(pair, wanted, note=b"\x07done", **regions) -> Future[None]:
    sender, receiver = pair
    return sender.transport.write(receiver.transport.name, wanted, note, **regions)


def test_a_write_lands_exactly_and_then_notifies(pair):
    sender, receiver = pair
    wanted = runs((0, 64, 100), (500, 4096, 1), (8192, 300, 3000))
    send(pair, wanted, b"\x07a\x00b").result(HANG_S)
    assert receiver.inbox.get(timeout=HANG_S) == (sender.transport.name, b"\x07a\x00b")
    expected = np.zeros(SIZE, dtype=np.uint8)
    for source, target, length in ((0, 64, 100), (500, 4096, 1), (8192, 300, 3000)):
        expected[target : target + length] = sender.bytes[source : source + length]
    assert (receiver.bytes == expected).all()


def test_the_bytes_are_there_when_the_notification_comes(pair):
    sender, receiver = pair
    for turn in range(20):
        sender.bytes[:] = turn + 1
        send(pair, Runs.of(0, 0, SIZE), bytes([7, turn]))
        assert receiver.inbox.get(timeout=HANG_S)[1] == bytes([7, turn])
        assert (receiver.bytes == turn + 1).all()


def test_many_scattered_runs(pair):
    sender, receiver = pair
    order = np.random.default_rng(2).permutation(SIZE // 256)
    offsets = np.arange(SIZE // 256, dtype=np.int64) * 256
    wanted = Runs(offsets, order.astype(np.int64) * 256, np.full(len(order), 256, dtype=np.int64))
    send(pair, wanted).result(HANG_S)
    receiver.inbox.get(timeout=HANG_S)
    assert (receiver.bytes.reshape(-1, 256)[order] == sender.bytes.reshape(-1, 256)).all()


def test_uneven_runs_that_share_no_grain(pair):
    sender, receiver = pair
    lengths = np.array([4001, 7, 9973, 1, 65537], dtype=np.int64)
    starts = np.cumsum(lengths + 3)
    targets = 500_000 - np.cumsum(lengths + 11)
    send(pair, Runs(starts, targets, lengths)).result(HANG_S)
    receiver.inbox.get(timeout=HANG_S)
    for source, target, length in zip(starts, targets, lengths, strict=True):
        assert (
            receiver.bytes[target : target + length] == sender.bytes[source : source + length]
        ).all()


def test_writes_to_a_second_region(pair):
    sender, receiver = pair
    extra = np.zeros(4096, dtype=np.uint8)
    region = receiver.transport.register(Memory.of_array(extra))
    assert region == 1
    sender.transport.connect(receiver.transport.metadata()).result(HANG_S)
    send(pair, Runs.of(100, 96, 4000), peer_region=region).result(HANG_S)
    receiver.inbox.get(timeout=HANG_S)
    assert (extra[96:] == sender.bytes[100:4100]).all() and not extra[:96].any()
    assert not receiver.bytes.any()


def test_earlier_metadata_hide_no_later_region(make):
    """The parts of an instance register memory one after the other, and peers meet all of them."""
    sender, receiver = make(), make()
    earlier = receiver.transport.metadata()
    extra = np.zeros(4096, dtype=np.uint8)
    region = receiver.transport.register(Memory.of_array(extra))
    later = receiver.transport.metadata()
    sender.bytes[:] = 7
    with receiver.transport.listening():
        for metadata in (later, earlier, later, earlier):
            peer = sender.transport.connect(metadata).result(HANG_S)
            written = sender.transport.write(peer, Runs.of(0, 0, 9), b"\x07", peer_region=region)
            sender.transport.connect(earlier).result(HANG_S)
            written.result(HANG_S)
            receiver.inbox.get(timeout=HANG_S)
    assert extra[:9].all() and not receiver.bytes.any()


def test_notifications_alone_both_ways(pair):
    sender, receiver = pair
    sender.transport.notify(receiver.transport.name, b"\x07ping").result(HANG_S)
    assert receiver.inbox.get(timeout=HANG_S) == (sender.transport.name, b"\x07ping")
    receiver.transport.connect(sender.transport.metadata()).result(HANG_S)
    with sender.transport.listening():
        receiver.transport.notify(sender.transport.name, b"\x07pong").result(HANG_S)
        assert sender.inbox.get(timeout=HANG_S) == (receiver.transport.name, b"\x07pong")


def test_notifications_of_one_peer_keep_their_order(pair):
    sender, receiver = pair
    for number in range(100):
        sender.transport.notify(receiver.transport.name, bytes([7, number]))
    assert [receiver.inbox.get(timeout=HANG_S)[1][1] for _ in range(100)] == list(range(100))


def test_a_payload_on_an_unknown_channel_is_dropped(pair, caplog):
    sender, receiver = pair
    sender.transport.notify(receiver.transport.name, b"\x09?").result(HANG_S)
    sender.transport.notify(receiver.transport.name, b"\x07!").result(HANG_S)
    assert receiver.inbox.get(timeout=HANG_S)[1] == b"\x07!"
    assert "no known channel" in caplog.text


def test_an_empty_notification_is_not_sent(pair, caplog):
    send(pair, Runs.of(0, 0, 8), b"").result(HANG_S)
    send(pair, Runs.of(0, 8, 8), b"\x07last").result(HANG_S)
    assert pair[1].inbox.get(timeout=HANG_S)[1] == b"\x07last"
    assert not caplog.records


def test_one_handler_a_channel(make):
    with pytest.raises(ValueError, match="channel 7"):
        make().transport.subscribe(7, lambda peer, payload: None)


def test_connecting_twice_is_once(pair):
    sender, receiver = pair
    name = sender.transport.connect(receiver.transport.metadata()).result(HANG_S)
    assert name == receiver.transport.name
    send(pair, Runs.of(0, 0, 10)).result(HANG_S)


@pytest.mark.parametrize("bad", [(SIZE - 1, 0, 2), (0, SIZE - 1, 2), (-1, 0, 1), (0, 0, 0)])
def test_runs_outside_a_region_are_refused(pair, bad):
    with pytest.raises(TransferError, match="write to"):
        send(pair, runs(bad)).result(HANG_S)
    assert not pair[1].bytes.any()


def test_an_unknown_region_is_refused(pair):
    with pytest.raises(TransferError, match="write to"):
        send(pair, Runs.of(0, 0, 1), peer_region=5).result(HANG_S)


def test_an_unknown_peer_is_refused(make):
    transport = make().transport
    with pytest.raises(PeerLostError, match="nobody"):
        transport.write("nobody", Runs.of(0, 0, 1), b"\x07").result(HANG_S)
    with pytest.raises(PeerLostError, match="nobody"):
        transport.notify("nobody", b"\x07").result(HANG_S)


def test_bad_metadata_is_refused(make):
    with pytest.raises(TransferError, match="metadata"):
        make().transport.connect(b"{}").result(HANG_S)


def test_after_disconnect_a_peer_is_unknown_until_it_is_connected_again(pair):
    sender, receiver = pair
    send(pair, Runs.of(0, 0, 10)).result(HANG_S)
    sender.transport.disconnect(receiver.transport.name).result(HANG_S)
    with pytest.raises(PeerLostError):
        send(pair, Runs.of(0, 0, 10)).result(HANG_S)
    sender.transport.connect(receiver.transport.metadata()).result(HANG_S)
    send(pair, Runs.of(5, 0, 10)).result(HANG_S)
    assert (receiver.bytes[:10] == sender.bytes[5:15]).all()


def test_a_write_not_yet_posted_can_be_cancelled(pair):
    _, receiver = pair
    entered, gate, caller = threading.Event(), threading.Event(), threading.get_ident()

    def hold(_: Future[None]) -> None:
        if threading.get_ident() != caller:
            entered.set()
            gate.wait(HANG_S)

    while not entered.wait(0.01):  # a write that has ended already calls back on this thread
        send(pair, Runs.of(0, 0, 8)).add_done_callback(hold)  # keeps the sender's thread
    late = send(pair, Runs.of(0, 4096, 8))
    assert late.cancel()
    gate.set()
    send(pair, Runs.of(0, 64, 8), b"\x07last").result(HANG_S)
    while receiver.inbox.get(timeout=HANG_S)[1] != b"\x07last":
        pass
    assert not receiver.bytes[4096:4104].any()


def test_a_closed_transport_fails_its_calls(make):
    first, second = make(), make()
    first.transport.connect(second.transport.metadata()).result(HANG_S)
    first.transport.close()
    first.transport.close()
    with pytest.raises(PeerLostError, match="closed"):
        first.transport.notify(second.transport.name, b"\x07").result(HANG_S)
    assert not second.transport.is_dead("nobody")


def test_many_threads_write_at_once(pair):
    sender, receiver = pair
    step = SIZE // 8

    def work(number: int) -> None:
        for part in range(8):
            at = number * step + part * (step // 8)
            send(pair, Runs.of(at, at, step // 8)).result(HANG_S)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert (receiver.bytes == sender.bytes).all()


# -- NIXL between processes


def _serve(pipe: ChildPipe) -> None:
    with ExitStack() as stack:
        end = End(NixlTransport(f"child-{next(_numbers)}"), 64 << 20)
        stack.callback(end.transport.close)
        pipe.say(end.transport.metadata())
        end.transport.connect(pipe.hear()).result(HANG_S)
        stack.enter_context(end.transport.listening())
        pipe.say("listening")
        while (request := pipe.hear()) != "end":
            if request == "message":
                pipe.say(end.inbox.get(timeout=HANG_S)[1])
            else:
                pipe.say(int(end.bytes[request[0] : request[1]].sum()))


def say(end: End, peer: str, number: int, *, is_write: bool) -> None:
    """At once: the number's byte, or the number alone."""
    payload = b"\x07%d" % number
    if is_write:
        end.transport.write(peer, Runs.of(number, 0, 1), payload, urgent=True)
    else:
        end.transport.notify(peer, payload, urgent=True)


@pytest.mark.parametrize("is_write", [True, False])
def test_what_is_urgent_and_answers_waited_for_with_progress(make, is_write):
    """Each end answers the other's word by the thread that waits for it; none is lost or twice."""
    ends = [make(), make()]
    names = [
        ends[1 - i].transport.connect(end.transport.metadata()).result(HANG_S)
        for i, end in enumerate(ends)
    ]
    heard: list[list[bytes]] = [[], []]

    def play(i: int) -> None:
        end, peer = ends[i], names[1 - i]
        for number in range(100):
            end.bytes[number] = number
            if i == 0 or heard[i]:
                say(end, peer, number, is_write=is_write)
            while end.inbox.empty():
                if not end.transport.progress():
                    break
            heard[i].append(end.inbox.get(timeout=HANG_S)[1])
        if i == 1:
            say(end, peer, 99, is_write=is_write)

    players = [threading.Thread(target=play, args=(i,)) for i in range(2)]
    with ends[0].transport.listening(), ends[1].transport.listening():
        for player in players:
            player.start()
        for player in players:
            player.join(HANG_S)
    numbers = [b"\x07%d" % number for number in range(100)]
    assert heard == [numbers[1:] + numbers[-1:], numbers]


@pytest.fixture
def child():
    made = Child(_serve)
    end = End(NixlTransport("parent"), 64 << 20)
    metadata = made.receive()
    peer = end.transport.connect(metadata).result(HANG_S)
    assert made.ask(end.transport.metadata()) == "listening"
    yield made, end, peer
    end.transport.close()
    made.close()


def test_two_processes(child):
    made, end, peer = child
    end.bytes[:] = 3
    write = end.transport.write(peer, Runs.of(0, 1000, 1 << 20), b"\x07here")
    assert made.ask("message") == b"\x07here"
    write.result(HANG_S)
    assert made.ask((0, 64 << 20)) == 3 << 20
    assert not end.transport.is_dead(peer)


def test_a_killed_peer_is_lost_and_known_dead(child):
    made, end, peer = child
    end.transport.write(peer, Runs.of(0, 0, 4096), b"\x07x").result(HANG_S)
    made.signal(signal.SIGKILL)
    with pytest.raises(PeerLostError):
        for _ in range(200):
            end.transport.notify(peer, b"\x07y").result(HANG_S)
            threading.Event().wait(0.05)
    with pytest.raises(PeerLostError):
        end.transport.write(peer, Runs.of(0, 0, 4096), b"\x07z").result(HANG_S)
    assert end.transport.is_dead(peer)


def test_a_write_to_a_stopped_peer_ends_only_with_the_peer(child):
    made, end, peer = child
    end.transport.write(peer, Runs.of(0, 0, 4096), b"\x07x").result(HANG_S)
    made.signal(signal.SIGSTOP)
    write = end.transport.write(peer, Runs.of(0, 0, 64 << 20), b"\x07y")
    with pytest.raises(TimeoutError):
        write.result(0.5)
    assert not write.cancel()
    assert not end.transport.is_dead(peer)
    made.signal(signal.SIGKILL)
    with end.transport.listening(), pytest.raises(PeerLostError):
        write.result(HANG_S)
