"""First come first served: FlowPrefill's and Medha's plainest baseline."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """The time of arrival; `now_s` plays no part, so a request keeps its place for good."""
    del now_s
    return (request.arrival_s,)
