"""The exchange and the server by their bytes: permitted writers, and dropped messages."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from millrace.core.errors import CapacityError, IntegrityError, TransferError
from millrace.core.kv.kvp_pass import ExchangeShape, Request
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.kvp.messages import KvpKind, KvpMessage, missing_body
from millrace.transfer.kvp.server import KvpServer
from millrace.transfer.transport.base import INLINE_BYTES
from millrace.transfer.transport.regions import Memory
from millrace.transfer.writer import GRACE_S
from support.clocks import given_to
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport

SHAPE = ExchangeShape(num_q_heads=2, num_kv_heads=1, head_dim=4, element_bytes=4, max_rows=4)
LEASE_S = 10 * HANG_S  # over when the clock skips it


class Echo:
    """Computes nothing: the first bytes of a request are returned as the first of the reply."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.seen: list[tuple[int, int, int]] = []
        self.at: dict[int, tuple[int, int]] = {}
        self.missing: tuple[int, ...] = ()

    def open(self, shard, pages, start_token, end_token) -> None:
        """Does nothing: there are no shards here."""

    def landed(self, shard, end_token) -> None:
        """Does nothing, as `open`."""

    def close(self, shard) -> None:
        """Does nothing, as `open`."""

    def begin(self, slot, piece, at, entries) -> None:
        self.at[slot] = at

    def layer(self, slot, piece, layer):
        self.seen.append((slot, piece, layer))
        if layer == 99:
            raise ValueError("there is no layer 99")
        source, target = self.at[slot]
        source += SHAPE.queries_at
        self.memory[target : target + 4] = self.memory[source : source + 4]
        return self.missing

    def forget(self, slot) -> None:
        self.at.pop(slot, None)


class Ends:
    """A KV owner and a KVP worker."""

    def __init__(self, places: int = 2, inline_bytes: int = INLINE_BYTES) -> None:
        hub = MemoryHub()
        self.owner, self.worker = MemoryTransport("owner", hub), MemoryTransport("worker", hub)
        self.sent = np.zeros(KvpExchange.memory_bytes(SHAPE, places), dtype=np.uint8)
        inbox = np.zeros(KvpServer.memory_bytes(SHAPE, places), dtype=np.uint8)
        self.lost: list[tuple[str, str]] = []
        self.exchange = KvpExchange(
            self.owner,
            Memory.of_array(self.sent),
            SHAPE,
            workers=places,
            timeout_s=2 * HANG_S,
            lease_s=LEASE_S,
            on_lost=lambda worker, why: self.lost.append((worker, why)),
            inline_bytes=inline_bytes,
        )
        self.echo = Echo(inbox)
        self.server = KvpServer(
            self.worker,
            Memory.of_array(inbox),
            SHAPE,
            self.echo,
            owners=places,
            lease_s=LEASE_S,
            inline_bytes=inline_bytes,
        )

    def attach(self) -> int:
        offer = self.exchange.offer()

        async def both() -> int:
            attachment = await self.server.attach(
                metadata=self.owner.metadata(), region=offer.region, offset=offer.offset
            )
            await self.exchange.attach(
                "h",
                offer,
                metadata=self.worker.metadata(),
                slot=attachment.slot,
                region=attachment.region,
                offset=attachment.offset,
            )
            return attachment.slot

        return asyncio.run(both())

    def ask(self, layer: int, word: int, *, entries: int = 0):
        request, reply = self.exchange.at("h")
        at = request + SHAPE.queries_at
        self.sent[at : at + 4] = word
        self.exchange.post("h", Request(0, layer, 1, 0, entries))
        return self.exchange.wait(), int(self.sent[reply])

    def settle(self) -> None:
        """Waits until both ends have sent their last message."""
        deadline_s = time.monotonic() + HANG_S
        while time.monotonic() < deadline_s:
            try:
                self.exchange.check_integrity(idle=True)
                self.server.check_integrity(idle=True)
                return
            except IntegrityError:
                time.sleep(0.01)
        raise AssertionError("a place is still lent")


@pytest.fixture
def ends(request):
    made = Ends(inline_bytes=getattr(request, "param", INLINE_BYTES))
    yield made
    made.server.close()
    made.owner.close()
    made.worker.close()


@pytest.mark.parametrize(
    "message",
    [
        KvpMessage(KvpKind.LAYER, 3, 2**40, 5, 31, 7, 2, 1),
        KvpMessage(KvpKind.PARTIAL, 3, 9, entries=2, body=missing_body((0, 5))),
        KvpMessage(KvpKind.FAILED, 1, body=b"schade"),
    ],
)
def test_messages_come_as_they_went(message):
    assert KvpMessage.decode(message.encode()) == message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x05\x01",
        KvpMessage(KvpKind.BYE, 1).encode()[:9],
        KvpMessage(KvpKind.PARTIAL, 1, entries=3, body=b"two or so").encode(),
    ],
)
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(TransferError, match="not a notification of an exchange"):
        KvpMessage.decode(payload)


@pytest.mark.parametrize("ends", [0, INLINE_BYTES], indirect=True, ids=["written", "inline"])
def test_each_layer_has_its_answer(ends):
    ends.attach()
    ends.exchange.begin()
    for layer in range(3):
        reply, word = ends.ask(layer, 40 + layer, entries=int(not layer))
        assert (reply.worker, reply.missing, reply.lost, word) == ("h", (), "", 40 + layer)
    assert ends.exchange.wait() is None
    ends.echo.missing = (0,)
    reply, word = ends.ask(3, 50)
    assert (reply.missing, word) == ((0,), 50)


@pytest.mark.parametrize(
    ("rows", "new_rows", "entries"), [(2, 0, 1), (5, 0, 1), (1, 2, 1), (1, 0, 9)]
)
def test_rows_that_do_not_fit_what_came_with_them_are_refused(ends, rows, new_rows, entries):
    slot = ends.attach()
    ends.exchange.begin()
    ends.ask(0, 1, entries=1)
    before = ends.echo.memory.copy()
    message = KvpMessage(KvpKind.LAYER, slot, 1, 0, 1, rows, new_rows, entries, b"x" * 48)
    ends.owner.notify("worker", message.encode()).result(HANG_S)
    reply, _ = ends.ask(1, 1)  # the answer to the forged request is the one to it
    assert "48 bytes came with" in reply.lost
    assert (ends.echo.memory == before).all()


def test_a_request_that_can_t_be_served_loses_the_worker(ends):
    ends.attach()
    ends.exchange.begin()
    ends.ask(0, 1, entries=1)
    reply, _ = ends.ask(99, 1)
    assert reply.lost == "there is no layer 99"
    assert ends.lost == [("h", "there is no layer 99")]
    assert ends.ask(1, 1)[0].lost == "there is no layer 99"


def test_answers_to_what_is_not_waited_for_are_dropped(ends):
    slot = ends.attach()
    ends.exchange.begin()
    ends.exchange.begin()
    late = KvpMessage(KvpKind.PARTIAL, slot, 1, 0, 0)
    ends.worker.notify("owner", late.encode()).result(HANG_S)
    of_another = KvpMessage(KvpKind.FAILED, slot + 1, 2, 0, 0)
    ends.worker.notify("owner", of_another.encode()).result(HANG_S)
    reply, word = ends.ask(0, 7, entries=1)
    assert (reply.lost, word) == ("", 7)


def test_a_place_is_lent_again_once_its_peer_has_said_goodbye(ends):
    slots = []
    for _ in range(5):
        slots.append(ends.attach())
        ends.exchange.detach("h")
        ends.settle()
    assert len(set(slots)) == 5


def test_a_place_waits_for_a_peer_that_may_still_write(ends, monkeypatch):
    """No thread handles the server's notifications: the KV owner's two places stay taken."""
    clock = given_to("millrace.transfer", monkeypatch)
    ends.attach()
    ends.worker.deliver = lambda *_: None
    ends.exchange.detach("h")
    ends.attach()
    ends.exchange.detach("h")
    with pytest.raises(CapacityError, match="2 by peers that may still write"):
        ends.exchange.offer()
    ends.worker.close()  # its process has ended; writes in flight land within the grace
    time.sleep(0.05)
    with pytest.raises(CapacityError):
        ends.exchange.offer()
    clock.skip(LEASE_S + 2 * GRACE_S)
    ends.exchange.withdraw(ends.exchange.offer())


def test_the_worker_may_end_the_exchange(ends):
    slot = ends.attach()
    ends.exchange.begin()
    ends.server.detach(slot)
    deadline_s = time.monotonic() + HANG_S
    while not ends.exchange.workers()["h"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    reply, _ = ends.ask(0, 1, entries=1)
    assert reply.lost == "h ended the exchange"
    ends.exchange.detach("h")
    ends.settle()


def test_a_worker_that_is_let_go_and_attached_anew_is_lost_to_the_pass_at_hand(ends):
    ends.attach()
    ends.exchange.begin()
    ends.ask(0, 5, entries=1)
    ends.exchange.detach("h")
    ends.attach()
    ends.exchange.post("h", Request(0, 1, 1, 0))
    assert ends.exchange.wait().lost == "h was detached"
    ends.exchange.begin()
    assert ends.ask(0, 6, entries=1) == (("h", (), ""), 6)


def test_misuse_is_refused(ends):
    assert ends.exchange.at("h") is None
    ends.attach()
    offer = ends.exchange.offer()
    with pytest.raises(TransferError, match="has h already"):
        asyncio.run(
            ends.exchange.attach(
                "h", offer, metadata=ends.worker.metadata(), slot=9, region=0, offset=0
            )
        )
    ends.exchange.begin()
    assert ends.exchange.at("h") == (0, SHAPE.request_bytes)
    ends.exchange.post("h", Request(0, 0, 1, 0, 1))
    with pytest.raises(TransferError, match="has not answered"):
        ends.exchange.post("h", Request(0, 1, 1, 0))
    small = np.zeros(8, dtype=np.uint8)
    with pytest.raises(ValueError, match="can't hold an exchange"):
        KvpExchange(ends.owner, Memory.of_array(small), SHAPE, workers=1, timeout_s=1, lease_s=1)
