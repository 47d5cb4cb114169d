"""First come first served: FlowPrefill's and Medha's plainest baseline."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns the time of arrival; `now_s` is ignored, so a request keeps its place for good."""
    del now_s
    return (request.arrival_s,)
