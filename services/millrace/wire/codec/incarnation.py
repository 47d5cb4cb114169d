"""Incarnations, and members (an incarnation and its address), to and from the wire."""

from __future__ import annotations

from millrace.core.kv.transfer import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.wire.pb import common_pb2, scheduler_pb2


def incarnation_message(incarnation: Incarnation) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(id=incarnation.id, generation=incarnation.generation)


def incarnation_of(message: common_pb2.Incarnation) -> Incarnation:
    return Incarnation(message.id, message.generation)


def member_message(member: Member) -> scheduler_pb2.Member:
    return scheduler_pb2.Member(
        incarnation=incarnation_message(member.incarnation), address=member.address
    )


def member_of(message: scheduler_pb2.Member) -> Member:
    return Member(incarnation=incarnation_of(message.incarnation), address=message.address)
