"""Which request goes first, where batch or memory have no room for all."""

from __future__ import annotations

from typing import Final

from millrace.decode.request import DecodeRequest

#: Seconds out of the batch after which a request has waited its share: it counts as in danger, so
#: that objectives of those who come later do not pass it over for ever.
LONGEST_AWAY_S: Final = 10.0
#: Of the TTFT objective; who still waits for memory then is in danger of missing it.
_TTFT_SHARE: Final = 0.5

Priority = tuple[bool, float, str]


def priority_of(request: DecodeRequest, away_s: float) -> Priority:
    """The least goes first, and is preempted last: those in danger, and then by arrival.

    `away_s`: how long a preempted request is out of the batch, as a rule.
    """
    return not in_danger(request, away_s), request.spec.arrival_unix_s, request.id


def in_danger(request: DecodeRequest, away_s: float) -> bool:
    """Whether so long a wait would break the request's objective, or it has waited its share."""
    now_s = request.clock.now_s()
    if request.away_since_s is not None and now_s - request.away_since_s > LONGEST_AWAY_S:
        return True
    slo = request.spec.slo
    if request.streams:
        return bool(slo.tbt_s) and tbt_slack_s(request, now_s) < away_s
    return 0 < (slo.ttft_s or 0.0) * _TTFT_SHARE < now_s


def tbt_slack_s(request: DecodeRequest, now_s: float) -> float:
    """Seconds until the next token must be out for the mean time between tokens to be within the
    objective. With several choices the mean over them counts."""
    tokens = request.generated_tokens / request.sampling.n
    return (request.spec.slo.tbt_s or 0.0) * tokens - (now_s - request.first_token_s)
