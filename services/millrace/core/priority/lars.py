"""Length-aware relative slack, Medha section 4.1.

    rho_i = s_i / w_i_total,  least first

s_i is the slack in seconds and w_i_total the predicted seconds of the request's whole prefill:
finished work lowers w_i(t) inside the slack but not the divisor. A second form divides by
the length of the deadline, d_i, as the authors' public code does; it is the policy
`lars_deadline`. The two agree where every deadline is the same multiple of the work.

Neither the paper nor the code says what a length of 0 means. Taken as the limit from above: rho is
inf with slack to spare, -inf without, and 0 in between; such a request costs nothing either way.
"""

from __future__ import annotations

import math

from millrace.core.live_request import LiveRequest
from millrace.core.priority.slack import slack_s


def relative_slack(request: LiveRequest, now_s: float) -> float:
    """Returns rho_i: slack per second of work; inf without a deadline."""
    return _per(slack_s(request, now_s), request.predicted_prefill_s)


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns the slack as a multiple of the whole prefill's predicted seconds."""
    return (relative_slack(request, now_s),)


def key_by_deadline(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns the slack as a share of the time from arrival to deadline."""
    return (_per(slack_s(request, now_s), request.deadline_s - request.arrival_s),)


def _per(slack_s: float, length_s: float) -> float:
    if math.isinf(slack_s) or slack_s == 0.0:
        return slack_s  # no deadline: its length is inf as well, and inf / inf no number
    return slack_s / length_s if length_s > 0.0 else math.copysign(math.inf, slack_s)
