"""Builds the bars of a request's TTFT waterfall, timed from its arrival at the proxy."""

from __future__ import annotations

import time

from millrace.core.span import Span


class Stopwatch:
    """A clock that counts seconds since a request's arrival at the proxy."""

    def __init__(self, arrival_unix_s: float) -> None:
        self._arrival_unix_s = arrival_unix_s

    def now_s(self) -> float:
        return time.time() - self._arrival_unix_s


def span(
    name: str,
    instance_id: str,
    start_s: float,
    end_s: float,
    **attributes: object,
) -> Span:
    """Builds a bar of the waterfall; times are in seconds since the request's arrival."""
    return Span(
        name=name,
        instance_id=instance_id,
        start_s=start_s,
        end_s=max(start_s, end_s),
        attributes={k: str(v) for k, v in attributes.items()},
    )
