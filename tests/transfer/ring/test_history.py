"""History that decode writes back: layer by layer, under leases, aborted in the middle."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.transfer.ring.history import History, HistoryGiver, LayerArrivals
from millrace.transfer.transport.layout import Side, layer_runs
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from support.clocks import given_to
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport
from support.slow_transport import SlowTransport
from transfer.ring.ring_nodes import FREE, RingNode, chunks_of, pool_layout

TOKENS = 30
LEASE_S = 10 * HANG_S  # over when the clock skips it
CONFIG = TransferConfig(lease_s=LEASE_S)


class Decode:
    """A decode instance that has the first tokens of a prompt; its pages differ from prefill's."""

    def __init__(self, hub: MemoryHub, node: RingNode, *, lease_s: float = LEASE_S) -> None:
        self.made = replace(pool_layout(pages=32), page_tokens=8)
        self.pool = np.zeros((self.made.num_layers, 32, 2, 2, 8, 4), dtype=np.float32)
        self.transport = SlowTransport("decode", hub)
        self.transport.register(Memory.of_array(self.pool.reshape(-1).view(np.uint8)))
        self.giver = HistoryGiver(self.transport, lease_s)
        self.transport.connect(node.metadata).result()
        node.transport.connect(self.transport.metadata()).result()

    def fill(self, node: RingNode, seed: int) -> None:
        for layer in range(self.made.num_layers):
            for token in range(TOKENS):
                values = node.value(seed, layer, np.array([token]))[0, ..., 0]
                self.pool[layer, token // 8, :, :, token % 8] = values[..., None]

    def history(self, info, laid) -> History:
        source = Side.of(self.made, list(range(4)), TOKENS)
        target = Side.of_runs(info.layout, info.pages, laid.fetched[info.instance_id])
        return History(
            peer=info.peer,
            runs=layer_runs(source, target, 0, TOKENS),
            layout=self.made,
            peer_layout=info.layout,
        )


@pytest.fixture
def clock(monkeypatch):
    return given_to("millrace.transfer", monkeypatch)


@pytest.fixture
def pair():
    hub = MemoryHub()
    node = RingNode("a", MemoryTransport("a", hub), pool_layout(pages=40), CONFIG)
    decode = Decode(hub, node)
    yield node, decode
    node.manager.check_integrity()
    decode.giver.check_integrity()
    node.check_free()
    node.transport.close()
    decode.transport.close()


def prepare(node):
    """A second attempt that continues after TOKENS tokens, at one instance."""
    chunks = chunks_of([20], [["a"]], start=TOKENS)
    job, info = node.prepare("r", chunks, seed=3, attempt=2)
    node.open(job, {"a": info})
    return job, info


def end(node, job) -> None:
    asyncio.run(asyncio.wait_for(job.link.close(), HANG_S))
    node.release(job)


def test_what_decode_kept_comes_back_layer_by_layer(pair):
    node, decode = pair
    job, info = prepare(node)
    decode.fill(node, seed=3)
    job.link.fetched("decode")
    gift = decode.giver.give("r", 2, decode.history(info, job.laid))
    assert node.compute(job)  # waits for each layer
    gift.over.result(HANG_S)
    assert gift.bytes_sent == TOKENS * decode.made.bytes_per_token
    node.check_share(job)
    assert not job.wrong
    end(node, job)


def test_one_layer_waits_while_another_moves_and_no_third(pair):
    """Keeps the next layer queued at the transport; a giver that stops has little to wait for."""
    node, decode = pair
    job, info = prepare(node)
    decode.fill(node, seed=3)
    job.link.fetched("decode")
    decode.transport.gate.clear()
    gift = decode.giver.give("r", 2, decode.history(info, job.laid))
    assert len(decode.transport.posted) == 2  # and no layer has ended
    decode.transport.gate.set()
    gift.over.result(HANG_S)
    assert len(decode.transport.posted) == decode.made.num_layers > 2
    assert decode.transport.most_in_flight == 2
    assert node.compute(job)
    end(node, job)


def test_an_abort_in_the_middle_stops_the_giver_before_the_pages_are_free(pair):
    node, decode = pair
    job, info = prepare(node)
    decode.fill(node, seed=3)
    decode.transport.gate.clear()
    job.link.fetched("decode")
    gift = decode.giver.give("r", 2, decode.history(info, job.laid))
    stopped = threading.Event()
    decode.transport.posted[1].add_done_callback(lambda _: stopped.set())
    job.link.abort()
    assert not node.compute(job)
    assert stopped.wait(HANG_S)
    decode.transport.gate.set()
    end(node, job)
    gift.over.result(HANG_S)
    assert gift.bytes_sent < TOKENS * decode.made.bytes_per_token


def test_what_was_given_up_is_not_given_any_more(pair):
    """The message that it is not wanted may overtake the call that asks for it."""
    node, decode = pair
    job, info = prepare(node)
    job.link.fetched("decode")
    job.link.abort()
    end(node, job)
    with pytest.raises(TransferError, match="request r: a has no use for the history of attempt 2"):
        decode.giver.give("r", 2, decode.history(info, job.laid))


def test_a_giver_writes_nothing_once_its_right_has_run_out(pair, clock):
    node, decode = pair
    job, info = prepare(node)
    job.link.fetched("decode")
    decode.transport.gate.clear()
    gift = decode.giver.give("r", 2, decode.history(info, job.laid))
    with pytest.raises(IntegrityError, match="history is still in flight"):
        decode.giver.check_integrity()
    heard = []
    hear, gift.heard = gift.heard, lambda: (heard.append(True), hear())
    clock.skip(2 * LEASE_S)
    decode.transport.gate.set()
    assert job.link.history(decode.made.num_layers - 1)
    gift.over.result(HANG_S)
    assert heard  # it asked before it wrote the last layer
    end(node, job)


def test_a_peer_that_is_gone_ends_the_gift(pair):
    node, decode = pair
    job, info = prepare(node)
    history = decode.history(info, job.laid)
    with pytest.raises(TransferError, match="history of request q for nobody: nobody is not"):
        decode.giver.give("q", 1, replace(history, peer="nobody")).over.result(HANG_S)
    job.link.abort()
    end(node, job)


def test_a_receiver_does_not_wait_for_what_can_not_be_written(pair):
    node, decode = pair
    job, info = prepare(node)
    job.link.fetched("decode")
    outside = Runs.of(0, node.pool.nbytes - 8, 16)
    gift = decode.giver.give("r", 2, replace(decode.history(info, job.laid), runs=outside))
    with pytest.raises(TransferError, match="a run leaves the target region"):
        gift.over.result(HANG_S)
    assert not job.link.history(0)
    end(node, job)
    assert job.aborted_by == ["decode gave up"]


def test_nothing_to_give_is_still_told(pair):
    node, decode = pair
    job, info = prepare(node)
    job.link.fetched("decode")
    none = Runs(*(np.empty(0, dtype=np.int64),) * 3)
    decode.giver.give("r", 2, replace(decode.history(info, job.laid), runs=none))
    assert job.link.history(2)
    assert (node.pool[:, :, job.pages] == FREE).all()
    end(node, job)


def test_arrivals_are_counted_by_giver_chunk_and_layer():
    arrivals = LayerArrivals(range(2))
    assert arrivals.has(0) and not arrivals.missing()
    arrivals.expect("a", 1)
    arrivals.expect("b", 1)
    with pytest.raises(ValueError, match="a is asked for the history of chunk 1 already"):
        arrivals.expect("a", 1)
    arrivals.arrived("a", 1, 0)
    assert not arrivals.has(0)
    arrivals.arrived("b", 1, 0)
    assert arrivals.has(0) and not arrivals.has(1)
    for giver, chunk, layer in (("a", 1, 0), ("a", 2, 1), ("c", 1, 0), ("a", 1, 2)):
        with pytest.raises(ValueError, match="came unexpectedly"):
            arrivals.arrived(giver, chunk, layer)
    arrivals.arrived("a", 1, 1)
    assert arrivals.missing() == {("b", 1)}
