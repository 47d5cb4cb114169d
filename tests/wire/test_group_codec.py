"""Messages from members to their leader: every field survives."""

from __future__ import annotations

import pytest

from millrace.core.errors import TransferError
from millrace.wire.codec.group import (
    hand_in_message,
    hand_in_of,
    join_message,
    join_of,
    members_message,
    members_of,
)
from millrace.wire.pb import gang_pb2
from support.messages import filled


def test_joins_come_back_as_they_were() -> None:
    message = filled(gang_pb2.JoinRequest)
    assert join_message(join_of(message)) == message
    assert join_of(join_message(join_of(message))) == join_of(message)


def test_members_come_back_as_they_were() -> None:
    reply = filled(gang_pb2.JoinReply, unset={"JoinReply.refusal"})  # read before the members are
    assert members_message(members_of(reply)) == reply


def test_hand_ins_come_back_as_they_were() -> None:
    message = filled(gang_pb2.HandInRequest)
    assert hand_in_message(hand_in_of(message)) == message


def test_a_layout_that_can_t_be_is_refused() -> None:
    with pytest.raises(TransferError, match="bad KV layout"):
        join_of(gang_pb2.JoinRequest())
