"""The end of the transports of one process."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from millrace.transfer.transport.base import PeerLostError
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport

CHANNEL = 7


def test_what_a_close_cancels_may_ask_for_more():
    """A caller that learns of a failed write tells others: that must not wait for the close."""
    hub = MemoryHub()
    one, other = MemoryTransport("one", hub), MemoryTransport("other", hub)
    assert one.connect(other.metadata()).result(HANG_S) == "other"
    entered, leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        entered.set()
        leave.wait(HANG_S)

    other.subscribe(CHANNEL, hold)
    payload = bytes([CHANNEL]) + bytes(8)
    one.notify("other", payload)
    assert entered.wait(HANG_S)
    told: list[Future[None]] = []
    waiting = one.notify("other", payload)
    waiting.add_done_callback(lambda _: told.append(one.notify("other", payload)))
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    while not waiting.cancelled():
        assert closing.is_alive()
    leave.set()
    closing.join(HANG_S)
    assert not closing.is_alive()
    with pytest.raises(PeerLostError, match="is closed"):
        told[0].result(HANG_S)
    other.close()
