"""Each request's first token against its objective and against what was predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.core.request import Request, RequestState
from millrace.core.scheduler.effects import Place, Record
from millrace.telemetry.metrics import Registry

#: Predicted over real seconds: 1 is exact, less is a first token later than predicted.
RATIO_BUCKETS = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    *(1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0),
)
#: Prompts up to so many tokens are counted together; longer ones as "more".
PROMPTS = {"1k": 1 << 10, "16k": 1 << 14, "128k": 1 << 17}


_HAS_TOKEN = frozenset({RequestState.TRANSFERRING, RequestState.DECODING, RequestState.FINISHED})


@dataclass(slots=True)
class _Waiting:
    """A request whose first token is not out; the last placement's time and predicted seconds."""

    request: Request
    placed_s: float = math.nan
    predicted_s: float = math.nan


class FirstTokens:
    """Follows every accepted request until its first token is out, or it ends without one.

    One that failed has missed its objective, whenever it did. One that was cancelled without a
    token counts as neither: nobody waits for it any more.
    """

    def __init__(self, registry: Registry) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._slo = registry.counter(
            "millrace_scheduler_slo_requests_total",
            "requests with a TTFT objective, by whether it was met",
            ["slo_class", "met"],
        )
        self._predicted = registry.histogram(
            "millrace_scheduler_predicted_ttft_seconds",
            "predicted time from placement to first token, by the prompt's length at most",
            ["prompt"],
        )
        self._ratio = registry.histogram(
            "millrace_scheduler_predicted_ttft_ratio",
            "the same over the real time",
            ["prompt"],
            buckets=RATIO_BUCKETS,
        )

    def submitted(self, request: Request) -> None:
        self._waiting[request.id] = _Waiting(request)

    def placed(self, effect: Place, now_s: float) -> None:
        """A request that is placed again is predicted anew."""
        waiting = self._waiting[effect.request_id]
        waiting.placed_s, waiting.predicted_s = now_s, effect.predicted_ttft_s

    def expected_s(self, request_id: str) -> float | None:
        """When the first token is to come, as the last placement predicts; None: not placed."""
        waiting = self._waiting.get(request_id)
        if waiting is None or math.isnan(waiting.placed_s):
            return None
        return waiting.placed_s + waiting.predicted_s

    def refused(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def recorded(self, record: Record, now_s: float) -> None:
        """Hears of every state; the first that has a token, or none to come, is the one counted."""
        waiting = self._waiting.get(record.request_id)
        if waiting is None:
            return
        first_token_s = now_s if record.state in _HAS_TOKEN else None
        if first_token_s is None and not record.state.is_final:
            return
        del self._waiting[record.request_id]
        if first_token_s is not None:
            self._count(waiting.request, first_token_s)
            if (real_s := first_token_s - waiting.placed_s) > 0.0:
                prompt = _length(waiting.request.prompt_tokens)
                self._predicted.labels(prompt).observe(waiting.predicted_s)
                self._ratio.labels(prompt).observe(waiting.predicted_s / real_s)
        elif record.state is RequestState.FAILED:
            self._count(waiting.request, math.inf)

    def _count(self, request: Request, first_token_s: float) -> None:
        slo = request.slo
        if slo.ttft_s is not None:
            met = first_token_s - request.arrival_s <= slo.ttft_s
            self._slo.labels(slo.class_name, str(met).lower()).inc()


def _length(tokens: int) -> str:
    return next((name for name, most in PROMPTS.items() if tokens <= most), "more")
