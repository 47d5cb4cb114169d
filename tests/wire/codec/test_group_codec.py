"""Messages from members to their leader: every field survives."""

from __future__ import annotations

import pytest

from millrace.core.errors import TransferError
from millrace.wire.codec.group import HAND_IN, JOIN, MEMBER
from millrace.wire.pb import gang_pb2
from support.messages import filled


def test_joins_come_back_as_they_were() -> None:
    message = filled(gang_pb2.JoinRequest)
    assert JOIN.encode(JOIN.decode(message)) == message
    assert JOIN.decode(JOIN.encode(JOIN.decode(message))) == JOIN.decode(message)


def test_members_come_back_as_they_were() -> None:
    message = filled(gang_pb2.GroupMember)
    assert MEMBER.encode(MEMBER.decode(message)) == message


def test_hand_ins_come_back_as_they_were() -> None:
    message = filled(gang_pb2.HandInRequest)
    assert HAND_IN.encode(HAND_IN.decode(message)) == message


def test_a_layout_that_can_t_be_is_refused() -> None:
    with pytest.raises(TransferError, match="bad KV layout"):
        JOIN.decode(gang_pb2.JoinRequest())
