"""The messages between KV owners and KVP workers survive protobuf."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.wire.codec import kvp as kvp_codec
from millrace.wire.pb import kvp_pb2
from support.kv_nodes import layout

ATTACH = AttachAsk(
    owner=Incarnation("d0", 2**60),
    worker=Incarnation("k0", 7),
    layout=layout(),
    max_rows=128,
    agent_metadata=b"meta",
    region=3,
    offset=2**40,
)
HOLD = HoldAsk(
    request_id="r",
    attempt=2,
    owner=Incarnation("d0", 5),
    worker=Incarnation("k0", 7),
    layout=layout(),
    start_token=32,
    end_token=100,
    prompt_tokens=50,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    arrival_unix_s=1_700_000_000.5,
)


def test_asks_and_grants_come_back_as_they_were() -> None:
    grant = AttachGrant(slot=9, agent_metadata=b"theirs", region=1, offset=4096)
    assert kvp_codec.attach_of(kvp_codec.ATTACH.encode(ATTACH)) == ATTACH
    assert kvp_codec.hold_of(kvp_codec.HOLD.encode(HOLD)) == HOLD
    assert kvp_codec.GRANT.decode(kvp_codec.GRANT.encode(grant)) == grant


def test_asks_that_can_t_be_are_named() -> None:
    message = kvp_codec.ATTACH.encode(replace(ATTACH, max_rows=0))
    with pytest.raises(TransferError, match="max_rows is 0"):
        kvp_codec.attach_of(message)
    for start, end in ((0, 10), (10, 10)):
        message = kvp_codec.HOLD.encode(replace(HOLD, start_token=start, end_token=end))
        with pytest.raises(TransferError, match=rf"tokens \[{start}, {end}\)"):
            kvp_codec.hold_of(message)
    with pytest.raises(TransferError, match="bad KV layout"):
        kvp_codec.hold_of(kvp_pb2.HoldRequest(start_token=1, end_token=2))


@pytest.mark.parametrize("start, landing", [(32, 18), (50, 0), (90, 0)])
def test_what_lands_of_a_shard_is_its_part_of_the_prompt(start: int, landing: int) -> None:
    shard = replace(HOLD, start_token=start)
    assert (shard.num_tokens, shard.landing_tokens) == (100 - start, landing)
