"""Earliest deadline first: the plain baseline of FlowPrefill section 6.3 and Medha section 4.1.

A deadline that has passed is earlier than any to come, so late requests go first: under overload
one late long prefill holds up all others (Medha section 4.1 calls it a convoy).
"""

from __future__ import annotations

from millrace.core.live_request import LiveRequest


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns the deadline, which does not move with time; requests without one come last."""
    del now_s
    return (request.deadline_s,)
