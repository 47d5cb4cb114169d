"""A transport that loses, repeats, alters, fails and stalls: only arrived data lands."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeQueued
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.messages import Kind, Message
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send import batching
from millrace.transfer.push.send.manager import SendManager
from millrace.transfer.transport.runs import Runs
from support.clocks import Clock, given_to
from support.deadlines import HANG_S, eventually
from support.kv_group import LocalPeer
from support.kv_nodes import Pool, expected_kv, fill, layout, read
from support.memory_transport import MemoryHub, MemoryTransport

#: Deadlines pass only where a test skips them.
DEADLINE_S = 10 * HANG_S
CONFIG = TransferConfig(
    lease_s=10 * DEADLINE_S, transfer_timeout_s=DEADLINE_S, handshake_timeout_s=2 * HANG_S
)
TOKENS, PAGES = 50, [0, 1, 2, 3]


class FaultyTransport(MemoryTransport):
    """`fault(message)` decides a write's fate: ok, lose, twice, fail, stall or another message."""

    fault = staticmethod(lambda message: "ok")

    def __init__(self, name: str, hub: MemoryHub) -> None:
        super().__init__(name, hub)
        self.posted: list[Future[None]] = []
        self.stalled: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return all(write.done() for write in self.posted)

    def write(self, *args, **kwargs) -> Future[None]:
        written = self.faulty(*args, **kwargs)
        if written is not self.stalled:
            self.posted.append(written)
        return written

    def faulty(self, peer, runs: Runs, notification, *, region=0, peer_region=0) -> Future[None]:
        what = self.fault(Message.decode(notification))
        regions = {"region": region, "peer_region": peer_region}
        if what == "stall":
            self.stalled = Future()
            self.stalled.set_running_or_notify_cancel()
            return self.stalled
        if what == "fail":
            return super().write(peer, Runs.of(-1, 0, 1), notification, **regions)
        if what == "lose":
            notification = b"\x00"
        elif isinstance(what, Message):
            notification = what.encode()
        if what == "twice":
            super().write(peer, runs, notification, **regions)
        return super().write(peer, runs, notification, **regions)


class World:
    """A sender and a receiver in this process, with one clock."""

    def __init__(self, config: TransferConfig, clock: Clock) -> None:
        hub = MemoryHub()
        self.clock = clock
        self.is_buffered = bool(config.buffer_bytes)
        self.layout = layout()
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.pools = Pool(self.layout), Pool(self.layout)
        self.transports = FaultyTransport("sender", hub), MemoryTransport("receiver", hub)
        self.receiver = ReceiveManager(
            transport=self.transports[1],
            layout=self.layout,
            storage=self.pools[1],
            identity=("decode-0", 7),
            config=config,
            callbacks=ReceiveCallbacks(
                on_first_tokens=lambda i, message: None,
                on_landed=lambda i: self.events.put_nowait(("landed", i)),
                on_prefix=lambda i, attempt, tokens: None,
                on_failed=lambda i, message, *kept: self.events.put_nowait(("failed", i, message)),
            ),
        )
        self.sender = SendManager(
            transport=self.transports[0],
            layout=self.layout,
            storage=self.pools[0],
            identity=("prefill-0", 5),
            config=config,
        )
        self.kv = expected_kv(self.layout, 1, TOKENS)
        fill(self.pools[0], self.layout, PAGES, self.kv)

    async def begin(self):
        self.receiver.admit("r", PAGES, TOKENS)
        session = await self.sender.open(
            "r",
            peer=LocalPeer(self.receiver),
            receiver=("decode-0", 7),
            prompt_tokens=TOKENS,
            pages=PAGES,
        )
        for chunk, (start, count) in enumerate(((0, 30), (30, 20))):
            for layer in range(self.layout.num_layers):
                session.layer_ready(chunk, layer, start, count)
        return session

    @asynccontextmanager
    async def passing_deadlines(self, are_due=lambda: True):
        """Lets deadlines pass whenever no write is in flight, after `are_due` is set."""

        async def skip() -> None:
            while True:
                await asyncio.sleep(0.05)
                if are_due() and self.transports[0].is_idle:
                    self.clock.skip(1.1 * DEADLINE_S)

        skipping = asyncio.create_task(skip())
        yield
        skipping.cancel()

    async def finish_in_vain(self, session, are_due=lambda: True) -> tuple[str, ...]:
        """Returns the receiver's verdict."""
        async with self.passing_deadlines(are_due):
            try:
                await session.finish(2)
            except TransferError:  # buffered: a lost slot is never freed, and the sender notices it
                await session.abort("stopped")
            return await self.event()

    async def event(self):
        async with asyncio.timeout(HANG_S):
            return await self.events.get()

    def landed(self) -> bool:
        return bool((read(self.pools[1], self.layout, PAGES, TOKENS) == self.kv).all())

    async def close(self) -> None:
        self.sender.check_integrity()
        self.receiver.check_integrity()
        await self.sender.close()
        await self.receiver.close()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def apart(monkeypatch):
    """Every part is a write of its own, as when compute is slower than the wire."""
    monkeypatch.setattr(batching, "MAX_PARTS", 1)


@pytest.fixture
def clock(monkeypatch):
    return given_to("millrace.transfer", monkeypatch)


@pytest.fixture(params=[0, 24_000], ids=["buffer-free", "buffered"])
async def world(request, apart, clock):
    made = World(dataclasses.replace(CONFIG, buffer_bytes=request.param), clock)
    yield made
    await made.close()


def on(kind: str, *, chunk=1, layer=1):
    """Injects the fault once, at one layer of one chunk."""
    seen = []

    def fault(message):
        if (chunk, layer) in [(p.chunk, p.layer) for p in message.parts] and not seen:
            seen.append(1)
            return kind
        return "ok"

    return fault


async def test_without_faults_it_lands(world):
    session = await world.begin()
    await session.finish(2)
    assert await world.event() == ("landed", "r")
    assert world.landed()
    await world.receiver.release("r")


async def test_a_lost_notification_fails_by_the_deadline(world):
    world.transports[0].fault = on("lose")
    kind, _, message = await world.finish_in_vain(await world.begin())
    assert kind == "failed"
    assert "first in layer 1" in message or "no progress" in message
    await world.receiver.release("r")


async def test_a_repeated_notification_fails_the_request(world):
    world.transports[0].fault = on("twice", chunk=0)
    session = await world.begin()
    kind, _, message = await world.event()
    assert kind == "failed"
    assert message.startswith("layer 1, heads 0..3, tokens 0..") and "arrived twice" in message
    await session.abort("failed")
    await world.receiver.release("r")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"nbytes": 17}, "came with 17 bytes"),
        ({"layer": 9}, "lies outside the request"),
        ({"start_token": 40}, "lies outside the request"),
        ({"generation": 6}, "missing, first in layer 1"),
        ({"lease": 99}, "missing, first in layer 1"),
        ({"request_id": "other"}, "missing, first in layer 1"),
    ],
)
async def test_an_altered_notification_never_lands(apart, clock, change, pattern):
    world = World(CONFIG, clock)
    once = on("alter")

    def alter(message):
        if once(message) != "alter":
            return "ok"
        if change.keys() & {"generation", "lease", "request_id"}:
            return dataclasses.replace(message, **change)
        return dataclasses.replace(message, parts=(message.parts[0]._replace(**change),))

    world.transports[0].fault = alter
    kind, _, message = await world.finish_in_vain(await world.begin())
    assert kind == "failed" and pattern in message
    await world.receiver.release("r")
    await world.close()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda parts: parts[:-1], "missing, first in layer 2"),
        (lambda parts: (*parts, parts[0]), "layer 0, heads 0..3, tokens 0..29 arrived twice"),
        (lambda parts: (*parts[:-1], parts[0]), "arrived twice"),
        (lambda parts: (*parts[1:], parts[0]._replace(nbytes=17)), "came with 17 bytes"),
        (lambda parts: (*parts[1:], parts[0]._replace(layer=9)), "lies outside the request"),
        (lambda parts: [p._replace(chunk=0) for p in parts], r"chunks \[0\] arrived, 2 were"),
        (lambda parts: (), "missing, first in layer 0"),
    ],
)
async def test_each_part_of_a_write_is_accounted_for_by_itself(clock, change, pattern):
    world = World(CONFIG, clock)
    sizes = []

    def alter(message):
        sizes.append(len(message.parts))
        return dataclasses.replace(message, parts=tuple(change(message.parts)))

    world.transports[0].fault = alter
    kind, _, message = await world.finish_in_vain(await world.begin())
    assert sizes == [2 * world.layout.num_layers]  # all was ready: one write
    assert kind == "failed" and re.search(pattern, message)
    await world.receiver.release("r")
    await world.close()


async def test_a_failed_write_fails_both_sides(world):
    world.transports[0].fault = on("fail")
    session = await world.begin()
    with pytest.raises(TransferError, match="request r: write to receiver"):
        await session.finish(2)
    await session.abort("write failed")
    assert (await world.event())[0] == "failed"
    await world.receiver.release("r")


async def test_a_stalled_write_meets_the_deadline_and_holds_the_pages(world):
    world.transports[0].fault = on("stall")
    session = await world.begin()
    async with world.passing_deadlines():
        stalled = f"no progress for {DEADLINE_S:g} s writing to decode-0"
        with pytest.raises(TransferError, match=stalled):
            await session.finish(2)
    aborting = asyncio.create_task(session.abort("stalled"))
    assert (await world.event())[0] == "failed"
    releasing = asyncio.create_task(world.receiver.release("r"))
    if world.is_buffered:  # a buffered write can't reach pages
        await eventually(releasing.done)
    else:
        await asyncio.sleep(0.3)
        assert not releasing.done()
    assert not aborting.done()
    world.transports[0].stalled.set_result(None)
    await asyncio.gather(aborting, releasing)
    await eventually(lambda: not world.receiver.num_leases)


async def test_a_sender_that_waits_for_a_backend_asks_again(clock):
    config = dataclasses.replace(CONFIG, buffer_bytes=24_000, backends=1, handshake_timeout_s=0.5)
    world = World(config, clock)
    refused = []
    peer = LocalPeer(world.receiver)
    handshake = peer.handshake

    async def counted(ask, *, timeout_s):
        try:
            return await handshake(ask, timeout_s=timeout_s)
        except HandshakeQueued as error:
            refused.append(str(error))
            raise

    peer.handshake = counted
    session = await world.begin()
    world.receiver.admit("s", [8], 5)
    other = await world.sender.open(
        "s", peer=peer, receiver=("decode-0", 7), prompt_tokens=5, pages=[8]
    )
    for layer in range(3):
        other.layer_ready(0, layer, 0, 5)
    await eventually(lambda: refused)
    assert "waits for one of 1 backends" in refused[0]
    await session.finish(2)
    await other.finish(1)
    assert [await world.event() for _ in range(2)] == [("landed", "r"), ("landed", "s")]
    for request in ("r", "s"):
        await world.receiver.release(request)
    await world.close()


@pytest.mark.parametrize("seed", range(6))
async def test_random_faults_never_land_wrong_bytes(seed, clock, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(batching, "MAX_PARTS", rng.choice([1, 2, 3]))
    config = dataclasses.replace(CONFIG, buffer_bytes=rng.choice([0, 24_000]))
    world = World(config, clock)
    faults = []

    def fault(message):
        if message.kind is Kind.WRITTEN and rng.random() < 0.1:
            faults.append(rng.choice(["lose", "twice", "fail"]))
            return faults[-1]
        return "ok"

    world.transports[0].fault = fault
    kind = (await world.finish_in_vain(await world.begin(), lambda: faults))[0]
    assert kind == ("failed" if faults else "landed")
    assert kind == "failed" or world.landed()
    await world.receiver.release("r")
    await world.close()
