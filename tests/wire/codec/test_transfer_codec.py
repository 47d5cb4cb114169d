"""Layouts, requests and grants survive protobuf."""

from __future__ import annotations

import dataclasses

import pytest

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeAsk, HandshakeGrant, Ticket
from millrace.wire.codec.transfer import (
    GRANT,
    HANDSHAKE,
    layout_message,
    layout_of,
)

LAYOUT = KvLayout(
    model_hash="m",
    dtype="bfloat16",
    num_layers=3,
    num_kv_heads=8,
    head_dim=16,
    page_tokens=32,
    head_start=2,
    head_count=4,
    num_pages=7,
    parts=2,
    layer_start=5,
    model_layers=12,
    copies=3,
    stages=2,
)


@pytest.mark.parametrize(
    "layout", [LAYOUT, dataclasses.replace(LAYOUT, layer_start=0, model_layers=0)]
)
def test_layouts(layout: KvLayout) -> None:
    assert layout_of(layout_message(layout)) == layout


def test_a_layout_that_says_nothing_of_the_model_has_all_its_layers() -> None:
    message = layout_message(dataclasses.replace(LAYOUT, layer_start=0, model_layers=0))
    message.ClearField("model_layers")
    assert layout_of(message).model_layers == LAYOUT.num_layers
    message.layer_start = 1
    with pytest.raises(TransferError, match=r"a peer sent a bad KV layout: .* model's 3 layers"):
        layout_of(message)


def test_asks_and_grants() -> None:
    ticket = Ticket(
        request_id="r", sender=Incarnation("a", 1), receiver=Incarnation("b", 2), attempt=3
    )
    ask = HandshakeAsk(
        ticket=ticket, layout=LAYOUT, start_token=160, num_tokens=70, agent_metadata=b"a"
    )
    assert HANDSHAKE.decode(HANDSHAKE.encode(ask)) == ask
    grant = HandshakeGrant(
        lease=4, layout=LAYOUT, pages=(3, 1, 2), agent_metadata=b"b", region=1, lease_s=2.5
    )
    assert GRANT.decode(GRANT.encode(grant)) == grant
