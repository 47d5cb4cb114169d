"""Builds the next incarnation of a request, which generates the tokens that are left."""

from __future__ import annotations

from dataclasses import replace

from millrace.core.request import MIN_KEPT_TOKENS
from millrace.core.request_spec import RequestSpec

#: An end-to-end objective that is over already leaves this many seconds: it is counted as missed.
LEAST_LEFT_S = 0.001


def continuation(
    spec: RequestSpec, request_id: str, generated: int, e2e_left_s: float | None = None
) -> RequestSpec:
    """Returns the spec of the rest of `spec` after `generated` tokens, which end its prompt.

    e2e_left_s: what is left of its end-to-end objective; None without one.

    Once a token is out, the rest has no time to first token, and the client has the prompt's log
    probabilities. A request that has generated enough kills no instance: the rest is no suspect.
    """
    if e2e_left_s is not None:
        spec = replace(spec, slo=replace(spec.slo, e2e_s=max(e2e_left_s, LEAST_LEFT_S)))
    if not generated:
        return replace(spec, request_id=request_id)
    sampling = replace(
        spec.sampling,
        max_tokens=spec.sampling.max_tokens - generated,
        min_tokens=max(spec.sampling.min_tokens - generated, 0),
        prompt_logprobs=-1,
    )
    return replace(
        spec,
        request_id=request_id,
        prompt_tokens=spec.prompt_tokens + generated,
        resumed_tokens=spec.resumed_tokens + generated,
        sampling=sampling,
        slo=replace(spec.slo, ttft_s=None),
        deaths=() if generated >= MIN_KEPT_TOKENS else spec.deaths,
    )
