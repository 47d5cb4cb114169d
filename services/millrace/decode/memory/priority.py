"""Ranks requests when the batch or memory has no room for all."""

from __future__ import annotations

from math import inf
from typing import Final

from millrace.decode.request import DecodeRequest

#: Seconds out of the batch after which a request counts as in danger, so that objectives of later
#: requests do not delay it for ever.
LONGEST_AWAY_S: Final = 10.0
#: A request that waits for memory counts as in danger after this share of its TTFT or end-to-end
#: objective.
_WAIT_SHARE: Final = 0.5

Priority = tuple[bool, float, str]


def priority_of(request: DecodeRequest, away_s: float) -> Priority:
    """Returns the sort key of a request: the least goes first and is preempted last.

    Requests in danger come first, then earlier arrivals. `away_s`: mean seconds that a preempted
    request is out of the batch.
    """
    return not in_danger(request, away_s), request.spec.arrival_unix_s, request.id


def in_danger(request: DecodeRequest, away_s: float) -> bool:
    """Whether a wait of `away_s` would break the request's objective, or it has waited too long."""
    now_s = request.clock.now_s()
    if request.away_since_s is not None and now_s - request.away_since_s > LONGEST_AWAY_S:
        return True
    if request.streams:
        return pace_slack_s(request, now_s) < away_s
    slo = request.spec.slo
    allowed_s = min(slo.ttft_s or inf, slo.e2e_s or inf)
    return allowed_s * _WAIT_SHARE < now_s


def pace_slack_s(request: DecodeRequest, now_s: float) -> float:
    """Returns the seconds in which the next token must be sent to keep the mean time between tokens
    within its pace; infinite without one. With several choices, the mean over the choices counts.
    """
    if request.pace_s == inf:
        return inf
    tokens = request.generated_tokens / request.sampling.n
    return request.pace_s * tokens - (now_s - request.first_token_s)
