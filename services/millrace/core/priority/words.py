"""The keys of the papers' policies in words."""

from __future__ import annotations

import math

from millrace.core.live_request import LiveRequest
from millrace.core.priority.lars import relative_slack as found_relative_slack
from millrace.core.priority.slack import slack_s


def age(request: LiveRequest, now_s: float) -> str:
    return f"arrived {now_s - request.arrival_s:.3g} s ago"


def deadline(request: LiveRequest, now_s: float) -> str:
    left_s = request.deadline_s - now_s
    if math.isinf(left_s):
        return "no deadline"
    return f"deadline in {left_s:.3g} s" if left_s > 0.0 else f"deadline {-left_s:.3g} s ago"


def slack(request: LiveRequest, now_s: float) -> str:
    return f"slack {slack_s(request, now_s):.3g} s"


def relative_slack(request: LiveRequest, now_s: float) -> str:
    return f"{slack(request, now_s)}, {found_relative_slack(request, now_s):.3g} of its length"
