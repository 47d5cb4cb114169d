"""The deadline of a request's first token, and whether an answer met its objectives.

An end-to-end objective leaves for the first token what the rest of the answer is not expected to
take: `e2e_s - (n - 1) step_s`, n being the expected length (`cost.answer_lengths`) and step_s the
predicted step of a decode instance with the request in its batch, in the mean over the instances.
The deadline is the earlier of this and of the TTFT objective. So the order of prefill, the policy
and placement see one deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.fleet.instances import DecodeInstance

#: Deadline of the first token of a request without an objective: this many times its prefill alone
#: after its arrival, at least this many seconds (the constants that Medha's authors released).
DEADLINE_FACTOR: Final = 1.5
LEAST_DEADLINE_S: Final = 0.5


def allowed_s(request: LiveRequest, step_s: float) -> float:
    """Returns the seconds from arrival to the first token's deadline, 0 or more.

    step_s: the predicted time between tokens of its answer.
    """
    slo = request.slo
    if slo.e2e_s is None:
        return slo.ttft_s or max(DEADLINE_FACTOR * request.predicted_prefill_s, LEAST_DEADLINE_S)
    following = request.expected_tokens - 1.0
    left_s = max(0.0, slo.e2e_s - following * step_s)
    return left_s if slo.ttft_s is None else min(slo.ttft_s, left_s)


def mean_step_s(request: LiveRequest, instances: Iterable[DecodeInstance]) -> float:
    """Returns the mean step of the instances with the request; 0 where none is known."""
    steps = [step_s for one in instances if (step_s := one.step_with_s(request)) > 0.0]
    return sum(steps) / len(steps) if steps else 0.0


def mean_tbt_s(request: LiveRequest, generated_tokens: int, now_s: float) -> float | None:
    """Returns the mean time between tokens of an answer that ended now; None without a second
    token.
    """
    following = generated_tokens / request.choices - 1.0
    if request.first_token_s is None or following <= 0.0:
        return None
    return max(now_s - request.first_token_s, 0.0) / following
