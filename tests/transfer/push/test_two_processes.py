"""Sender and receiver as two real processes over NIXL and gRPC: bytes, deaths, stops, leaks."""

from __future__ import annotations

import signal

import pytest

from millrace.core.config import TransferConfig
from support.kv_nodes import expected_kv, layout, pages_of, receiver_child, sender_child
from support.transfer_peers import Child

TOKENS = 203


@pytest.fixture
def spawn():
    children = []

    def start(target, *args) -> Child:
        children.append(Child(target, *args))
        return children[-1]

    yield start
    for child in children:
        child.close()


class Pair:
    """Both children, and the calls of a test to them."""

    def __init__(self, spawn, sender_layout, receiver_layout, config, sender_config=None) -> None:
        self.sides = (sender_layout, receiver_layout)
        self.receiver = spawn(receiver_child, receiver_layout, config)
        self.sender = spawn(sender_child, sender_layout, sender_config or config)
        self.address, self.identity = self.receiver.receive()
        self.sender.receive()

    def begin(self, request_id: str, seed: int, tokens: int = TOKENS) -> list[int]:
        """Admits, fills the sender's pages and opens the session. Returns the receiver's pages."""
        sent, received = (pages_of(side, tokens, seed) for side in self.sides)
        assert self.sender.ask(("fill", sent, seed, tokens)) == "ok"
        assert self.receiver.ask(("admit", request_id, received, tokens)) == "ok"
        opened = ("open", request_id, self.address, self.identity, sent, tokens)
        assert self.sender.ask(opened) == "ok"
        assert self.sender.ask(("granted", request_id)) == "ok"
        return received

    def layers(self, request_id, chunk, start, count) -> None:
        assert self.sender.ask(("layers", request_id, chunk, start, count)) == "ok"

    def landed(self, pages, seed, tokens: int = TOKENS) -> bool:
        made = self.sides[1]
        got = self.receiver.ask(("read", pages, tokens))
        want = expected_kv(made, seed, tokens)[:, :, made.head_start : made.head_end]
        return bool((got == want).all())

    def check(self) -> None:
        assert self.sender.ask(("check",)) == "ok"
        assert self.receiver.ask(("check",)) == "ok"


#: Seconds, for failures that only silence shows.
CONFIG = TransferConfig(lease_s=2.0, transfer_timeout_s=2.0, handshake_timeout_s=60.0)
#: Seconds, for all else: only a hang takes so long.
PATIENT = TransferConfig(lease_s=60.0, transfer_timeout_s=60.0, handshake_timeout_s=60.0)


@pytest.mark.parametrize(
    ("sender", "receiver", "buffer_bytes"),
    [
        (layout(page_tokens=5), layout(page_tokens=32, heads=(1, 2)), 0),
        (layout(), layout(page_tokens=7), 20_000),
    ],
)
def test_exact_bytes(spawn, sender, receiver, buffer_bytes):
    config = TransferConfig(buffer_bytes=buffer_bytes, backends=2, lease_s=60.0)
    pair = Pair(spawn, sender, receiver, config)
    for seed in (1, 2):
        request = f"request-{seed}"
        pages = pair.begin(request, seed)
        pair.layers(request, 0, 0, 100)
        pair.layers(request, 1, 100, 1)
        pair.layers(request, 2, 101, TOKENS - 101)
        assert pair.sender.ask(("finish", request, 3)) == "ok"
        assert pair.receiver.ask(("event",)) == ("first", request, "[11]")
        assert pair.receiver.ask(("event",)) == ("landed", request)
        assert pair.landed(pages, seed)
        assert pair.receiver.ask(("release", request)) == "ok"
        assert pair.receiver.ask(("released", request)) == "ok"
        pair.check()


def test_a_killed_sender_fails_the_request_and_frees_its_pages(spawn):
    pair = Pair(spawn, layout(), layout(), PATIENT)
    pair.begin("r", 1)
    pair.layers("r", 0, 0, 100)
    pair.sender.signal(signal.SIGKILL)
    kind, _, message = pair.receiver.ask(("event",))
    assert kind == "failed" and "prefill-0 is gone" in message
    assert pair.receiver.ask(("release", "r")) == "ok"
    assert pair.receiver.ask(("released", "r")) == "ok"
    assert pair.receiver.ask(("check",)) == "ok"


def test_a_stopped_sender_keeps_its_pages_in_quarantine_until_it_has_drained(spawn):
    pair = Pair(spawn, layout(), layout(), CONFIG)
    pair.begin("r", 1)
    pair.layers("r", 0, 0, 100)
    pair.sender.signal(signal.SIGSTOP)
    kind, _, message = pair.receiver.ask(("event",))
    assert kind == "failed" and "no message from prefill-0 for 2 s" in message
    assert pair.receiver.ask(("release", "r")) == "ok"
    pair.receiver.send(("released", "r"))
    assert not pair.receiver.pipe.poll(1.5)
    pair.sender.signal(signal.SIGCONT)
    assert pair.receiver.receive() == "ok"
    message = pair.sender.ask(("finish", "r", 1))[1]  # in either order
    assert "stopped the transfer" in message or "no message from decode-0" in message
    assert pair.sender.ask(("abort", "r", "failed")) == "ok"
    pair.check()


def test_a_stopped_receiver_meets_the_senders_own_deadline(spawn):
    pair = Pair(spawn, layout(), layout(), CONFIG)
    pair.begin("r", 1)
    pair.layers("r", 0, 0, 100)
    pair.receiver.signal(signal.SIGSTOP)
    pair.layers("r", 1, 100, TOKENS - 100)
    kind, message = pair.sender.ask(("finish", "r", 2))
    assert kind == "error" and ("deadline" in message or "no progress" in message)
    pair.receiver.signal(signal.SIGKILL)
    assert pair.sender.ask(("abort", "r", "failed")) == "ok"
    assert pair.sender.ask(("check",)) == "ok"


def test_a_killed_receiver_fails_the_sender(spawn):
    pair = Pair(spawn, layout(), layout(), PATIENT)
    pair.begin("r", 1)
    pair.layers("r", 0, 0, 100)
    pair.receiver.signal(signal.SIGKILL)
    pair.layers("r", 1, 100, TOKENS - 100)
    kind, _ = pair.sender.ask(("finish", "r", 2))
    assert kind == "error"
    assert pair.sender.ask(("abort", "r", "failed")) == "ok"
    assert pair.sender.ask(("check",)) == "ok"


def test_cancel_midway_drains_and_leaves_nothing(spawn):
    pair = Pair(spawn, layout(), layout(), PATIENT)
    for number in range(3):
        request = f"r{number}"
        pair.begin(request, number)
        pair.layers(request, 0, 0, 100)
        assert pair.sender.ask(("abort", request, "cancelled")) == "ok"
        kind, _, message = pair.receiver.ask(("event",))
        assert kind == "failed" and "prefill-0 gave the transfer up" in message
        assert pair.receiver.ask(("release", request)) == "ok"
        assert pair.receiver.ask(("released", request)) == "ok"
        pair.check()


def test_a_receiver_that_needs_no_more_lets_the_sender_finish(spawn):
    pair = Pair(spawn, layout(), layout(), PATIENT)
    pair.begin("r", 1)
    pair.layers("r", 0, 0, 100)
    assert pair.receiver.ask(("release", "r")) == "ok"
    assert pair.receiver.ask(("released", "r")) == "ok"
    pair.layers("r", 1, 100, TOKENS - 100)
    assert pair.sender.ask(("finish", "r", 2)) == "ok"
    pair.check()
