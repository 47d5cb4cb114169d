"""Deadline-aware EDF, FlowPrefill section 6.3: S-EDF without foresight.

    priority = sgn(deadline - current time) / deadline,  higher first

Requests whose deadline has passed come after all others. Among them -1/deadline puts the latest
deadline first. The paper does not say what a deadline of exactly now counts as: it is missed, as
in `s_edf`, since the first token takes some time.
"""

from __future__ import annotations

from millrace.core.live_request import LiveRequest


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns (0, deadline) while the deadline is ahead, (1, -deadline) from then on."""
    deadline_s = request.deadline_s
    return (0.0, deadline_s) if deadline_s > now_s else (1.0, -deadline_s)
