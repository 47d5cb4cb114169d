"""Least remaining slack, the baseline of Medha sections 1 and 4.1.

The request with the least absolute slack s_i = a_i + d_i - t - w_i(t) goes first. The paper spells
the name out in section 1 and says in section 4.1 why raw slack misleads, but gives no separate
formula: this is the slack of section 4.1, undivided. (The caption of its figure 13 speaks of a
"modified LRS", the text beside it of LARS without multi-prefill batching; that is `lars` on a
packer with `multi_prefill` off.) Like EDF it puts requests that are hopelessly late first.
"""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.priority.slack import slack_s


def key(request: LiveRequest, now_s: float) -> tuple[float, ...]:
    """Returns the slack in seconds."""
    return (slack_s(request, now_s),)
