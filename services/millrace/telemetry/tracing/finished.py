"""A span that has ended, as the exporters take it.

The SDK's own class of spans would cost a request as much as all that is known about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})
_EXPORTED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


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

    def computed(self) -> Attributes:
        """Returns the attributes, computed if they are a function."""
        return self.attributes() if callable(self.attributes) else self.attributes

    @property
    def context(self) -> SpanContext:
        """What the SDK's processor of batches asks for: spans that come to it are sampled."""
        return _EXPORTED
