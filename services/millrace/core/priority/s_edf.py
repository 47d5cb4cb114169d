"""Slack-aware EDF, FlowPrefill section 5.2, Eq. (3).

    priority = sgn(slack) / deadline,  slack = deadline - current time - predicted TTFT,
    higher first

Requests that can still be in time go first, by earliest deadline. Requests that can't go last, and
among them -1/deadline puts the latest deadline first. A slack of 0 counts as negative: the paper's
definition of sgn leaves the case open and its "non-negative slack" contradicts it, but with nothing
to spare, any wait at all misses the deadline.

Deviation: the key holds sign and deadline instead of their quotient. The order is the same for
every positive deadline. The quotient also needs a clock that starts before all deadlines and loses
digits as the clock grows (two deadlines a millisecond apart at 10^9 s get equal quotients); the
pair does neither. A request without a deadline lies where 1/inf = 0 puts it: after all that can be
in time, ahead of all that can't.
"""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.priority.slack import slack_s


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns (0, deadline) while there is slack, (1, -deadline) once there is none."""
    deadline_s = request.deadline_s
    return (0.0, deadline_s) if slack_s(request, now_s) > 0.0 else (1.0, -deadline_s)
