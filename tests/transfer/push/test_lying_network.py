"""Managers over a network that loses, repeats, reorders, delays, alters and cuts messages."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import asynccontextmanager

import numpy as np
import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.sp_layout import Run
from millrace.transfer.push.checksums import PartSums
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.messages import WrittenRange
from millrace.transfer.push.receive.landing import Checksums
from millrace.transfer.push.send import batching
from millrace.transfer.transport.layout import Side
from millrace.transfer.transport.regions import Memory
from support.clocks import Clock, given_to
from support.deadlines import HANG_S
from support.faulty_transport import FAULTS, FaultyTransport
from support.kv_group import RECEIVER, LocalPeer
from support.kv_nodes import KvReceiver, KvSender, expected_kv, layout
from support.memory_transport import MemoryHub, MemoryTransport

#: Deadlines pass only where a test skips them.
DEADLINE_S = 10 * HANG_S
CONFIG = TransferConfig(
    lease_s=10 * DEADLINE_S,
    transfer_timeout_s=DEADLINE_S,
    handshake_timeout_s=2 * HANG_S,
    kv_checksum="on",
)
TOKENS = 50
CHUNKS = ((0, 30), (30, 20))


class World:
    """A sender and a receiver with other pages and heads, over transports that may lie."""

    def __init__(
        self, clock: Clock, config: TransferConfig, wrap=lambda inner: inner, wrap_back=None
    ) -> None:
        hub = MemoryHub()
        self.clock = clock
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.corrupt: list[str] = []
        said = self.events.put_nowait
        callbacks = ReceiveCallbacks(
            on_first_tokens=lambda i, message: None,
            on_landed=lambda i: said(("landed", "")),
            on_prefix=lambda i, attempt, tokens: None,
            on_failed=lambda i, message, *kept: said(("failed", message)),
            on_corrupt=self.corrupt.append,
        )
        self.ends = (
            wrap(MemoryTransport("prefill-0", hub)),
            (wrap_back or (lambda inner: inner))(MemoryTransport("decode-0", hub)),
        )
        self.sender = KvSender(("prefill-0", 5), self.ends[0], layout(page_tokens=8), config)
        self.receiver = KvReceiver(RECEIVER, self.ends[1], layout(heads=(1, 2)), config, callbacks)
        self.kv = expected_kv(self.sender.layout, 1, TOKENS)
        self.whole = [Run(0, TOKENS, 0)]

    @property
    def faults(self) -> int:
        return sum(end.seen.total() for end in self.ends if isinstance(end, FaultyTransport))

    async def send(self, request_id: str) -> tuple[str, str, list[int]]:
        """Sends a prompt; returns the receiver's verdict, its reason, and its pages."""
        pages = self.receiver.take(self.receiver.layout.pages_for(TOKENS))
        self.receiver.manager.admit(request_id, pages, TOKENS)
        sent = self.sender.take(self.sender.layout.pages_for(TOKENS))
        self.sender.fill(sent, self.whole, self.kv)
        session = await self.sender.manager.open(
            request_id,
            peer=LocalPeer(self.receiver.manager),
            receiver=RECEIVER,
            prompt_tokens=TOKENS,
            pages=sent,
        )
        for chunk, (start, count) in enumerate(CHUNKS):
            for layer in range(self.sender.layout.num_layers):
                session.layer_ready(chunk, layer, start, count)
        try:
            await session.finish(len(CHUNKS))
        except TransferError as error:
            await session.abort(str(error))
        self.sender.slot(sent, 0)[:] = np.nan  # the pages are another request's from here on
        self.sender.free.update(sent)
        async with asyncio.timeout(HANG_S):
            return *(await self.events.get()), pages

    @asynccontextmanager
    async def passing_deadlines(self, *, passing: bool = True):
        """Lets deadlines pass and late calls go, again and again, once there was a fault; or none,
        where the receiver finds the fault by itself.
        """

        async def skip() -> None:
            while True:
                await asyncio.sleep(0.02)
                if passing and self.faults:
                    self.clock.skip(1.1 * DEADLINE_S)
                    self.let_go()

        skipping = asyncio.create_task(skip())
        yield
        skipping.cancel()

    def let_go(self) -> None:
        for end in self.ends:
            if isinstance(end, FaultyTransport):
                end.release()

    async def check_released(self, request_id: str, pages: list[int]) -> None:
        """Releases the pages, and asserts that no late write reaches them."""
        await self.receiver.manager.release(request_id)
        rows = self.receiver.pool.array[:, pages]
        rows[:] = 7.0
        self.receiver.pool.array[:, pages] = rows
        self.let_go()
        async with asyncio.timeout(HANG_S):
            await asyncio.wrap_future(self.ends[0].connect(self.ends[1].metadata()))  # in order
        assert (self.receiver.pool.array[:, pages] == 7.0).all()
        self.receiver.free.update(pages)

    def calm(self) -> None:
        for end in self.ends:
            if isinstance(end, FaultyTransport):
                end.probability = 0.0

    async def close(self) -> None:
        await self.receiver.close()
        await self.sender.close()


@pytest.fixture
def clock(monkeypatch):
    return given_to("millrace.transfer", monkeypatch)


async def check(world: World, *, passing: bool = True) -> tuple[str, str]:
    """Sends under faults, then without: what lands is exact, and what fails lands when repeated."""
    async with world.passing_deadlines(passing=passing):
        verdict, why, pages = await world.send("r")
        assert verdict == "failed" or world.receiver.holds(pages, world.whole, world.kv)
        world.calm()
        await world.check_released("r", pages)
    again, reason, pages = await world.send("again")
    assert again == "landed", reason
    assert world.receiver.holds(pages, world.whole, world.kv)
    await world.check_released("again", pages)
    await world.close()
    return verdict, why


@pytest.mark.parametrize("buffer_bytes", [0, 24_000], ids=["buffer-free", "buffered"])
@pytest.mark.parametrize("where", ["write", "to receiver", "to sender"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_alone(clock, monkeypatch, fault, where, buffer_bytes) -> None:
    monkeypatch.setattr(batching, "MAX_PARTS", 2)
    config = dataclasses.replace(CONFIG, buffer_bytes=buffer_bytes)

    def wrap(inner):
        return FaultyTransport(
            inner,
            3,
            faults=[fault],
            probability=1.0,
            most=1,
            on_writes=where == "write",
            on_notifications=where != "write",
        )

    world = World(
        clock, config, *((lambda inner: inner, wrap) if where == "to sender" else (wrap, None))
    )
    is_changed = where == "write" and fault in ("corrupt", "truncate")
    verdict, why = await check(world, passing=not is_changed)
    if is_changed:
        assert verdict == "failed" and "another checksum than was sent" in why
        assert world.corrupt == ["prefill-0"]
    elif where == "write" and fault in ("drop", "duplicate"):
        assert verdict == "failed" and world.faults == 1
    else:
        assert not world.corrupt


@pytest.mark.parametrize("seed", range(40))
async def test_many_faults_at_once(clock, monkeypatch, seed) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(batching, "MAX_PARTS", rng.choice([1, 2, 3]))
    config = dataclasses.replace(CONFIG, buffer_bytes=rng.choice([0, 24_000]))
    probability = rng.choice([0.05, 0.3])
    world = World(
        clock,
        config,
        lambda inner: FaultyTransport(inner, seed, probability=probability),
        lambda inner: FaultyTransport(inner, seed + 1000, probability=probability),
    )
    verdict, _ = await check(world)
    assert world.faults or verdict == "landed"


async def test_without_checksums_a_changed_bit_lands(clock) -> None:
    """So the checksum, and nothing else, is what finds it."""
    config = dataclasses.replace(CONFIG, kv_checksum="off")
    world = World(
        clock,
        config,
        lambda inner: FaultyTransport(inner, 3, faults=["corrupt"], probability=1.0, most=1),
    )
    verdict, _, pages = await world.send("r")
    assert verdict == "landed"
    assert not world.receiver.holds(pages, world.whole, world.kv)
    await world.receiver.manager.release("r")
    world.receiver.free.update(pages)
    await world.close()


@pytest.mark.parametrize("page_tokens", [4, 16, 64])
@pytest.mark.parametrize("copies", [1, 2])
def test_both_ends_sum_the_same_bytes_in_the_same_order(page_tokens, copies) -> None:
    """Ends with other pages, heads, ranks and rows shorter or longer than are copied first."""
    one = layout(page_tokens=16, pages=8)
    other = dataclasses.replace(
        layout(page_tokens=page_tokens, pages=32, heads=(2, 2)), copies=copies
    )
    kv = expected_kv(one, 5, 60)
    part = WrittenRange(0, 1, 7, 41, 0)
    sums = []
    for made, peer, sends in ((one, other, True), (other, one, False)):
        pool = np.zeros((made.ranks, made.pool_bytes // made.ranks // 4), dtype=np.float32)
        shape = (made.num_layers, made.num_pages, 2, made.head_count, made.page_tokens, 8)
        for rank in pool:
            pages = rank.reshape(shape)
            for token in range(60):
                heads = slice(made.head_start, made.head_end)
                pages[:, token // made.page_tokens, :, :, token % made.page_tokens] = kv[
                    :, :, heads, token
                ]
        side = Side.of(made, range(made.pages_for(60)), 60)
        memory = Memory.of_array(pool.reshape(-1).view(np.uint8))
        sums.append(PartSums(memory, side, peer, sends=sends).of(part))
        pool[-1].reshape(shape)[1, 10 // made.page_tokens, 1, -1, 10 % made.page_tokens, 3] += 1
        assert PartSums(memory, side, peer, sends=sends).of(part) != sums[-1] or (
            made.ranks < copies
        )
    assert sums[0] == sums[1] != 0


def test_checksums_need_a_pool_that_the_host_reads() -> None:
    made = layout()
    with pytest.raises(ConfigError, match=r"kv_checksum is 'on'.*in device memory"):
        Checksums(Memory(0, made.pool_bytes, device=0), made)
    with pytest.raises(ConfigError, match=r"kv_checksum is 'on'.*memory of 2 processes"):
        Checksums(Memory(0, made.pool_bytes), dataclasses.replace(made, copies=2))
