"""Translates spans to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.span import Span
from millrace.wire.pb import common_pb2


def span_to_wire(span: Span) -> common_pb2.Span:
    return common_pb2.Span(
        name=span.name,
        instance_id=span.instance_id,
        start_s=span.start_s,
        end_s=span.end_s,
        attributes=span.attributes,
    )


def span_from_wire(message: common_pb2.Span) -> Span:
    return Span(
        name=message.name,
        instance_id=message.instance_id,
        start_s=message.start_s,
        end_s=message.end_s,
        attributes=dict(message.attributes),
    )


def spans_to_wire(spans: Iterable[Span]) -> list[common_pb2.Span]:
    return [span_to_wire(span) for span in spans]


def spans_from_wire(messages: Iterable[common_pb2.Span]) -> list[Span]:
    return [span_from_wire(message) for message in messages]
