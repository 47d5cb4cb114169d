"""A transport of several members: cutting of writes, all degrees, failures of one member."""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.transport.base import PeerLostError
from millrace.transfer.transport.joined import JoinedTransport, Segment, split
from millrace.transfer.transport.layout import Side, at_layer, layer_runs
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport

_numbers = itertools.count()
HEADS = 4
LAYERS = 3
WHOLE = KvLayout(
    model_hash="m",
    dtype="float16",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=4,
    page_tokens=4,
    head_start=0,
    head_count=HEADS,
    num_pages=9,
)
TOKENS = 30


def of_degree(ranks: int, stages: int = 1, **changes: int) -> KvLayout:
    """The layout of an instance of that many ranks in each of so many stages."""
    parts = min(ranks, HEADS)
    return dataclasses.replace(WHOLE, parts=parts, copies=ranks // parts, stages=stages, **changes)


# -- cutting


def segments(sizes: list[int]) -> list[Segment]:
    starts = [0, *itertools.accumulate(sizes)][:-1]
    return [Segment(rank, rank + 5, start) for rank, start in enumerate(starts)]


@settings(max_examples=200)
@given(st.data())
def test_cut_runs_copy_what_the_whole_runs_copy(data: st.DataObject) -> None:
    sizes = [data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)) for _ in range(2)]
    totals = [sum(some) for some in sizes]
    runs, at = [], 0
    while at < totals[1]:
        length = data.draw(st.integers(1, min(totals[1] - at, totals[0])))
        runs.append((data.draw(st.integers(0, totals[0] - length)), at, length))
        at += length + data.draw(st.integers(0, 3))
    whole = Runs(*(np.array(column, dtype=np.int64) for column in zip(*runs, strict=True)))
    source = np.arange(1, totals[0] + 1, dtype=np.uint8)
    expected, found = (np.zeros(totals[1], dtype=np.uint8) for _ in range(2))
    copy_on_host(Memory.of_array(source), Memory.of_array(expected), whole)
    here, there = map(segments, sizes)
    seen = set()
    for one, other, piece in split(whole, here, there):
        seen.add((one.member, other.member))
        parts = [
            array[side.start : side.start + some[side.member]]
            for array, side, some in ((source, one, sizes[0]), (found, other, sizes[1]))
        ]
        copy_on_host(*map(Memory.of_array, parts), piece)  # refuses what leaves a segment
    assert (found == expected).all()
    assert len(seen) == len(split(whole, here, there))


@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_pair_of_ranks_exchanges_the_heads_that_both_hold(ranks: int, theirs: int) -> None:
    """Every rank of the receiver gets each of its heads once, and from a rank that holds it."""
    sender, receiver = of_degree(ranks), of_degree(theirs, page_tokens=8, num_pages=5)
    runs = layer_runs(
        Side.of(sender, range(8), TOKENS), Side.of(receiver, range(4), TOKENS), 0, TOKENS
    )
    sides = [segments([one.part_bytes] * one.ranks) for one in (sender, receiver)]
    got = dict.fromkeys(range(theirs), 0)
    for one, other, piece in split(runs, *sides):
        shared = set(sender.heads_of(one.member)) & set(receiver.heads_of(other.member))
        assert piece.total_bytes == len(shared) * TOKENS * 2 * WHOLE.row_bytes
        got[other.member] += len(shared)
    assert got == {rank: len(receiver.heads_of(rank)) for rank in range(theirs)}


# -- instances of ranks


class Instance:
    """Members with a pool and an agent each, in this process."""

    def __init__(self, kind: str, hub: MemoryHub, layout: KvLayout) -> None:
        name = f"instance-{next(_numbers)}"
        self.layout = layout
        self.pools = np.zeros((layout.ranks, layout.part_bytes), dtype=np.uint8)
        self.agents = [
            MemoryTransport(f"{name}.{member}", hub)
            if kind == "memory"
            else NixlTransport(f"{name}.{member}")
            for member in range(len(layout.member_pools))
        ]
        flat = self.pools.reshape(-1)
        memories = [
            Memory.of_array(flat[pool.start : pool.start + pool.nbytes])
            for pool in layout.member_pools
        ]
        self.transport = JoinedTransport(self.agents[0], self.agents[1:], memories)
        self.region = self.transport.register(memories[0])
        self.inbox: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.transport.subscribe(7, lambda peer, payload: self.inbox.put((peer, payload)))

    @property
    def side(self) -> Side:
        return Side.of(self.layout, range(self.layout.pages_for(TOKENS)), TOKENS)

    def heads(self) -> np.ndarray:
        """Returns uint16 [ranks, layers, 2, heads of a rank, tokens, head_dim]."""
        made = self.layout
        pages = made.pages_for(TOKENS)
        shape = (made.ranks, LAYERS, made.num_pages, 2, made.part_heads, made.page_tokens, 4)
        rows = (
            self.pools.view(np.uint16).reshape(shape)[:, :, :pages].transpose(0, 1, 3, 4, 2, 5, 6)
        )
        return rows.reshape(made.ranks, LAYERS, 2, made.part_heads, -1, 4)

    def fill(self, kv: np.ndarray) -> None:
        """kv: uint16 [layers, 2, heads of the model, tokens, head_dim]."""
        made, pages = self.layout, self.layout.pages_for(TOKENS)
        shape = (made.ranks, LAYERS, made.num_pages, 2, made.part_heads, made.page_tokens, 4)
        pool = self.pools.view(np.uint16).reshape(shape)
        padded = np.zeros((LAYERS, 2, HEADS, pages * made.page_tokens, 4), dtype=np.uint16)
        padded[:, :, :, :TOKENS] = kv
        paged = padded.reshape(LAYERS, 2, HEADS, pages, made.page_tokens, 4).transpose(
            0, 3, 1, 2, 4, 5
        )
        for rank in range(made.ranks):
            pool[rank, :, :pages] = paged[:, :, :, list(made.heads_of(rank))]

    def send(self, other: Instance, note: bytes) -> Future[None]:
        runs = layer_runs(self.side, other.side, 0, TOKENS)
        layers = [at_layer(runs, self.layout, other.layout, layer) for layer in range(LAYERS)]
        return self.transport.write(
            other.transport.name,
            Runs.joined(layers),
            note,
            region=self.region,
            peer_region=other.region,
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def pair(
    stack: ExitStack, kind: str, ranks: int, theirs: int, stages: tuple[int, int] = (1, 1)
) -> tuple[Instance, Instance]:
    hub, degrees = MemoryHub(), zip((ranks, theirs), stages, strict=True)
    first, second = (Instance(kind, hub, of_degree(*degree)) for degree in degrees)
    made = first, second
    for one, other in (made, made[::-1]):
        stack.callback(one.transport.close)
        stack.enter_context(one.transport.listening())
        name = one.transport.connect(other.transport.metadata()).result(HANG_S)
        assert name == other.transport.name
    return made


@pytest.mark.parametrize("kind", ["memory", "nixl"])
@pytest.mark.parametrize(
    ("ranks", "theirs", "stages"),
    [
        *((*ranks, (1, 1)) for ranks in [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 8), (8, 4)]),
        *((1, 1, stages) for stages in [(1, 2), (2, 1), (2, 3), (3, 3)]),
        *((*ranks, stages) for ranks in [(2, 2), (4, 1), (1, 8)] for stages in [(1, 2), (3, 2)]),
    ],
)
def test_any_degree_into_any_other(
    stack: ExitStack, kind: str, ranks: int, theirs: int, stages: tuple[int, int]
) -> None:
    sender, receiver = pair(stack, kind, ranks, theirs, stages)
    rng = np.random.default_rng(3)
    for turn in range(2):
        kv = rng.integers(1, 1 << 16, (LAYERS, 2, HEADS, TOKENS, 4), dtype=np.uint16)
        sender.fill(kv)
        written = sender.send(receiver, b"\x07%d" % turn)
        assert receiver.inbox.get(timeout=HANG_S) == (sender.transport.name, b"\x07%d" % turn)
        found = receiver.heads()[:, :, :, :, :TOKENS]  # all pieces lie there when it is told
        for rank in range(theirs):
            assert (found[rank] == kv[:, :, list(receiver.layout.heads_of(rank))]).all()
        written.result(HANG_S)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_write_fails_and_is_not_told_when_a_rank_of_the_peer_is_gone(
    stack: ExitStack, ended: int
) -> None:
    sender, receiver = pair(stack, "memory", 2, 2)
    receiver.agents[ended].close()
    with pytest.raises(PeerLostError):
        sender.send(receiver, b"\x07x").result(HANG_S)
    assert receiver.inbox.empty()
    assert not sender.transport.is_dead(receiver.transport.name)  # the other rank may still write
    receiver.agents[1 - ended].close()
    assert sender.transport.is_dead(receiver.transport.name)


def test_a_write_fails_when_a_rank_of_our_own_is_gone(stack: ExitStack) -> None:
    sender, receiver = pair(stack, "memory", 2, 1)
    sender.agents[1].close()
    with pytest.raises(PeerLostError, match="closed"):
        sender.send(receiver, b"\x07x").result(HANG_S)
    assert receiver.inbox.empty()


def test_a_failed_write_ends_after_its_slowest_piece(stack: ExitStack) -> None:
    """Our memory is read until then."""
    sender, receiver = pair(stack, "memory", 2, 2)
    slow: Future[None] = Future()
    slow.set_running_or_notify_cancel()
    sender.agents[1].write = lambda *_, **__: slow
    receiver.agents[0].close()
    written = sender.send(receiver, b"\x07x")
    with pytest.raises(TimeoutError):
        written.result(0.2)
    assert not written.cancel()
    slow.set_result(None)
    with pytest.raises(PeerLostError):
        written.result(HANG_S)


def test_runs_outside_the_pools_and_bad_metadata_are_refused(stack: ExitStack) -> None:
    sender, receiver = pair(stack, "memory", 2, 2)
    size = sender.pools.size
    for bad in ((size - 1, 0, 2), (-1, 0, 1), (0, size, 1), (0, 0, 0)):
        with pytest.raises(TransferError, match="write to"):
            sender.transport.write(receiver.transport.name, Runs.of(*bad), b"\x07").result(HANG_S)
    for bad_data in (b"{}", b'{"ranks": []}', b'{"ranks": ["e30="], "regions": [[[3, 0, 0]]]}'):
        with pytest.raises(TransferError, match="metadata"):
            sender.transport.connect(bad_data).result(HANG_S)
