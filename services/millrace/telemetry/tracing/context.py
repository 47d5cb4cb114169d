"""The W3C trace context: which trace a request belongs to, and the span above its spans."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SAMPLED: Final = 1  # the flag of trace-flags


class TraceContext(NamedTuple):
    """A trace (128 bits), a span of it (64 bits), and whether the trace is sampled."""

    trace_id: int
    span_id: int
    sampled: bool

    @staticmethod
    def parse(traceparent: str) -> TraceContext | None:
        """Reads a `traceparent`; None if it is empty or malformed (the standard ignores both)."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        trace_id, span_id, flags = match.groups()
        return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def log_fields(request_id: str, traceparent: str) -> dict[str, str]:
    """Returns the fields of a log record that is about a request, for `extra`."""
    fields = {"request_id": request_id}
    if trace_id := trace_id_of(traceparent):
        fields["trace_id"] = trace_id
    return fields


def trace_id_of(traceparent: str) -> str:
    """Returns the trace id of a well-formed `traceparent`, 32 hexadecimal digits; else nothing."""
    return traceparent[3:35]
