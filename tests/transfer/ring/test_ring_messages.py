"""Notifications inside a group, encoded and decoded."""

from __future__ import annotations

import pytest

from millrace.core.errors import TransferError
from millrace.transfer.ring.messages import KEPT, RING_CHANNEL, RingKind, RingMessage
from millrace.transfer.ring.recent import Recent


@pytest.mark.parametrize("kind", list(RingKind))
def test_each_kind_survives_the_way(kind):
    message = RingMessage(
        kind=kind, request_id="request-\u00e4", attempt=3, chunk=KEPT, number=2**40
    )
    payload = message.encode()
    assert payload[0] == RING_CHANNEL
    assert RingMessage.decode(payload) == message
    assert message.key == ("request-\u00e4", 3)


@pytest.mark.parametrize(
    "payload", [b"", b"\x03\x01", b"\x01" + bytes(30), b"\x03\x63" + bytes(30)]
)
def test_other_bytes_are_refused(payload):
    with pytest.raises(TransferError, match="not a notification of a ring"):
        RingMessage.decode(payload)


def test_what_ended_long_ago_is_forgotten():
    recent = Recent(most=2)
    for key in (1, 2, 1, 3):
        recent.add(key)
    assert 1 in recent and 3 in recent and 2 not in recent
