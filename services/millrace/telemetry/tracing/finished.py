"""A span that has ended, and its form in OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_OK: Final = Status(StatusCode.UNSET)


class Moment(NamedTuple):
    """An event within a span, at a Unix time in ns."""

    name: str
    at_ns: int
    attributes: Attributes = NO_ATTRIBUTES


class FinishedSpan(NamedTuple):
    """A span that has ended. Times are Unix times in ns; `error` is empty unless it failed.

    Attributes that take long to compute may be given as a function, called if it is exported.
    """

    trace_id: int
    span_id: int
    parent_id: int  # 0: none
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes | Callable[[], Attributes] = NO_ATTRIBUTES
    moments: tuple[Moment, ...] = ()
    error: str = ""
    kind: SpanKind = SpanKind.INTERNAL

    def readable(self, resource: Resource) -> ReadableSpan:
        """Returns the span as the SDK's exporters take it."""
        parent = None
        if self.parent_id:
            parent = SpanContext(self.trace_id, self.parent_id, True, _SAMPLED)
        return ReadableSpan(
            self.name,
            context=SpanContext(self.trace_id, self.span_id, False, _SAMPLED),
            parent=parent,
            resource=resource,
            attributes=self.attributes() if callable(self.attributes) else self.attributes,
            events=tuple(Event(one.name, one.attributes, one.at_ns) for one in self.moments),
            kind=self.kind,
            status=Status(StatusCode.ERROR, self.error) if self.error else _OK,
            start_time=self.start_ns,
            end_time=self.end_ns,
        )
