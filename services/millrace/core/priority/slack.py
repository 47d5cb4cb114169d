"""Slack: how long a request may still wait and meet its deadline.

FlowPrefill section 5.2 (`slack = deadline - current time - predicted TTFT`) and Medha section 4.1
(`s_i = a_i + d_i - t - w_i(t)`) define the same quantity; `deadline_s` is Medha's a_i + d_i. The
prediction covers the prefill still to do, without executed work. So the slack of a computing
request stays constant, and the slack of a waiting request falls by a second every second.
"""

from __future__ import annotations

from millrace.core.live_request import LiveRequest


def slack_s(request: LiveRequest, now_s: float) -> float:
    """Returns the seconds to spare at `now_s`; negative if the deadline is out of reach, inf
    without one.
    """
    return request.deadline_s - now_s - request.remaining_s(now_s)
