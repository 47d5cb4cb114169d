"""The exchange of attention over a network that loses, repeats, delays, alters and cuts."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
import pytest

from millrace.core.kv.kvp_pass import ExchangeShape, Request
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.kvp.server import KvpServer
from millrace.transfer.transport.base import INLINE_BYTES
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.regions import Memory
from support.clocks import Clock, given_to
from support.deadlines import HANG_S
from support.faulty_transport import FaultyTransport
from support.memory_transport import MemoryHub, MemoryTransport

SHAPE = ExchangeShape(num_q_heads=2, num_kv_heads=1, head_dim=4, element_bytes=4, max_rows=4)
TIMEOUT_S = 10 * HANG_S  # over when the clock skips it
LAYERS, ROWS = 12, 2
#: The faults that length or order can tell. Without checksums a changed bit in K/V or results, or
#: the lost end of written bytes (`inline_bytes` 0), can't be told.
FAULTS = ("drop", "duplicate", "delay", "reorder", "truncate")


class Doubling:
    """Returns every query row twice its value, as int32, and zeros behind it."""

    def __init__(self, memory: np.ndarray) -> None:
        self._words = memory.view(np.int32)
        self._at: dict[int, tuple[int, int]] = {}

    def open(self, shard, pages, start_token, end_token) -> None:
        """Does nothing: there are no shards here."""

    def landed(self, shard, end_token) -> None:
        """Does nothing, as `open`."""

    def close(self, shard) -> None:
        """Does nothing, as `open`."""

    def begin(self, slot, piece, at, entries) -> None:
        self._at[slot] = at

    def layer(self, slot, piece, layer):
        request, reply = self._at[slot]
        q = (request + SHAPE.queries_at) // 4
        count = SHAPE.sent_bytes(ROWS, 0) // 4
        self._words[reply // 4 : reply // 4 + count] = 2 * self._words[q : q + count]
        return ()

    def forget(self, slot) -> None:
        self._at.pop(slot, None)


class Ends:
    """A KV owner and a KVP worker whose transports may lie, once `lie` is called."""

    def __init__(
        self, seed: int, inline_bytes: int, faults, where: str, checks: bool = False
    ) -> None:
        hub = MemoryHub()
        self.owner, self.worker = (
            FaultyTransport(MemoryTransport(name, hub), seed, faults=faults, probability=0.0)
            for name in ("owner", "worker")
        )
        self._liars = {"owner": [self.owner], "worker": [self.worker]}.get(
            where, [self.owner, self.worker]
        )
        self.sent = np.zeros(KvpExchange.memory_bytes(SHAPE, 1), dtype=np.uint8)
        inbox = np.zeros(KvpServer.memory_bytes(SHAPE, 1), dtype=np.uint8)
        common = {"lease_s": TIMEOUT_S, "inline_bytes": inline_bytes}
        owner, worker = (CheckedTransport(one, checks=checks) for one in (self.owner, self.worker))
        self.exchange = KvpExchange(
            owner, Memory.of_array(self.sent), SHAPE, workers=1, timeout_s=TIMEOUT_S, **common
        )
        self.server = KvpServer(
            worker, Memory.of_array(inbox), SHAPE, Doubling(inbox), owners=1, **common
        )
        offer = self.exchange.offer()

        async def attach() -> None:
            made = await self.server.attach(
                metadata=self.owner.metadata(), region=offer.region, offset=offer.offset
            )
            await self.exchange.attach(
                "h",
                offer,
                metadata=self.worker.metadata(),
                slot=made.slot,
                region=made.region,
                offset=made.offset,
            )

        asyncio.run(attach())
        self.exchange.begin()

    def lie(self, probability: float) -> None:
        for end in self._liars:
            end.probability = probability

    @property
    def faults(self) -> int:
        return self.owner.seen.total() + self.worker.seen.total()

    def layers(self) -> tuple[int, str]:
        """Asks layer after layer; returns how many answers came, all right, and the loss."""
        request, reply = self.exchange.at("h")
        q = request + SHAPE.queries_at
        count = SHAPE.sent_bytes(ROWS, 0) // 4
        for layer in range(LAYERS):
            words = np.arange(count, dtype=np.int32) + 1000 * layer
            self.sent[q : q + 4 * count] = words.view(np.uint8)
            self.exchange.post("h", Request(0, layer, ROWS, 0, int(not layer)))
            answer = self.exchange.wait()
            if answer.lost:
                return layer, answer.lost
            found = self.sent[reply : reply + 4 * count].view(np.int32)
            assert (found == 2 * words).all(), layer
        return LAYERS, ""

    def close(self) -> None:
        self.server.close()
        self.owner.close()
        self.worker.close()


def run(ends: Ends, clock: Clock, *, keeps_away: bool = True) -> tuple[int, str]:
    """Asks all layers. Where faults may keep an answer away, a deadline passes after each."""
    over = threading.Event()

    def skip() -> None:
        seen = 0
        while not over.is_set():
            time.sleep(0.02)
            if keeps_away and ends.faults > seen:
                seen = ends.faults
                clock.skip(2 * TIMEOUT_S)

    skipping = threading.Thread(target=skip)
    skipping.start()
    try:
        return ends.layers()
    finally:
        over.set()
        skipping.join()
        ends.close()


@pytest.fixture
def clock(monkeypatch):
    return given_to("millrace.transfer.kvp", monkeypatch)


@pytest.mark.parametrize("where", ["owner", "worker"])
@pytest.mark.parametrize(
    ("fault", "inline_bytes"),
    [
        *((fault, INLINE_BYTES) for fault in FAULTS),
        *((fault, 0) for fault in FAULTS if fault != "truncate"),
    ],
)
def test_no_fault_gives_a_wrong_answer(clock, fault, where, inline_bytes) -> None:
    ends = Ends(1, inline_bytes, (fault,), where)
    ends.lie(0.5)
    answered, lost = run(ends, clock, keeps_away=fault != "duplicate")
    assert ends.faults
    assert answered == LAYERS or lost
    if fault == "duplicate":
        assert answered == LAYERS
    else:
        assert answered < LAYERS


@pytest.mark.parametrize("where", ["owner", "worker"])
@pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0])
@pytest.mark.parametrize("fault", ["corrupt", "truncate"])
def test_checksums_tell_what_else_can_not_be_told(clock, fault, inline_bytes, where) -> None:
    """The pair is lost at once: no deadline passes, as the clock stands."""
    ends = Ends(1, inline_bytes, (fault,), where, checks=True)
    ends.lie(0.5)
    answered, lost = run(ends, clock, keeps_away=False)
    assert answered < LAYERS
    assert "not a notification" in lost or "ended the exchange" in lost


@pytest.mark.parametrize("seed", range(8))
def test_many_faults_never_give_a_wrong_answer(clock, seed) -> None:
    rng = random.Random(seed)
    ends = Ends(seed, INLINE_BYTES, FAULTS, "both")
    ends.lie(rng.choice([0.02, 0.1, 0.3]))
    answered, lost = run(ends, clock)
    assert answered == LAYERS or lost
