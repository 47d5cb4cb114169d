"""Translates incarnations to and from protobuf."""

from __future__ import annotations

from millrace.core.kv.transfer import Incarnation
from millrace.wire.pb import common_pb2


def incarnation_message(incarnation: Incarnation) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(id=incarnation.id, generation=incarnation.generation)


def incarnation_of(message: common_pb2.Incarnation) -> Incarnation:
    return Incarnation(message.id, message.generation)
