"""Translates incarnations, and members (an incarnation and its address)."""

from __future__ import annotations

from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.wire.codec.derive import derive
from millrace.wire.pb import common_pb2, scheduler_pb2

INCARNATION = derive(Incarnation, common_pb2.Incarnation)
MEMBER = derive(Member, scheduler_pb2.Member)
incarnation_message, incarnation_of = INCARNATION.encode, INCARNATION.decode
