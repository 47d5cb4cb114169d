"""Translates the messages between the members of an SP group and their leader.

A bad layout of a member raises TransferError.
"""

from __future__ import annotations

from millrace.core.instance.group import GroupMember, HandIn, JoinAsk
from millrace.wire.codec.derive import derive
from millrace.wire.codec.transfer import LAYOUT
from millrace.wire.pb import gang_pb2

MEMBER = derive(GroupMember, gang_pb2.GroupMember, layout=LAYOUT)
JOIN = derive(JoinAsk, gang_pb2.JoinRequest, member=MEMBER)
HAND_IN = derive(HandIn, gang_pb2.HandInRequest)
