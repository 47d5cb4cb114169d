"""Compares each request's first token with its objective and with its predicted time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.core.request import Request, RequestState
from millrace.core.scheduler.effects import Place, Record
from millrace.telemetry.metrics import Registry

#: Predicted time over real time: 1 is exact; below 1, the first token came later than predicted.
RATIO_BUCKETS = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    *(1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0),
)
#: Upper bounds of prompt lengths in tokens; longer prompts are counted as "more".
PROMPTS = {"1k": 1 << 10, "16k": 1 << 14, "128k": 1 << 17}


_HAS_TOKEN = frozenset({RequestState.TRANSFERRING, RequestState.DECODING, RequestState.FINISHED})


@dataclass(slots=True)
class _Waiting:
    """A request without a first token; the last placement's time and predicted seconds."""

    request: Request
    placed_s: float = math.nan
    predicted_s: float = math.nan


class FirstTokens:
    """Follows every accepted request until its first token, or its end without a token.

    A failed request has missed its objective, at any time. A request that is cancelled without a
    token counts neither as met nor as missed: no client waits for it.
    """

    def __init__(self, registry: Registry) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._slo = registry.counter(
            "millrace_scheduler_slo_requests_total",
            "requests with a TTFT objective, by whether they met it",
            ["slo_class", "met"],
        )
        self._predicted = registry.histogram(
            "millrace_scheduler_predicted_ttft_seconds",
            "predicted time from placement to first token, by the bound of the prompt's length",
            ["prompt"],
        )
        self._ratio = registry.histogram(
            "millrace_scheduler_predicted_ttft_ratio",
            "predicted over real time from placement to first token",
            ["prompt"],
            buckets=RATIO_BUCKETS,
        )

    def submitted(self, request: Request) -> None:
        self._waiting[request.id] = _Waiting(request)

    def placed(self, effect: Place, now_s: float) -> None:
        """Notes the prediction of a placement; a later placement replaces it."""
        waiting = self._waiting.get(effect.request_id)
        if waiting is not None:  # else it had its first token before a takeover
            waiting.placed_s, waiting.predicted_s = now_s, effect.predicted_ttft_s

    def expected_s(self, request_id: str) -> float | None:
        """Returns when the last placement predicts the first token, in s; None if not placed."""
        waiting = self._waiting.get(request_id)
        if waiting is None or math.isnan(waiting.placed_s):
            return None
        return waiting.placed_s + waiting.predicted_s

    def refused(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def recorded(self, record: Record, now_s: float) -> None:
        """Takes every state; counts the first state with a token, or an end without a token."""
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
