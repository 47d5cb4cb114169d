"""Between a request's plain types and the engine's: sampling settings, log-probabilities."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.token_events import PositionLogprobs
from millrace.engine.sampling import logprobs as engine_logprobs
from millrace.engine.sampling.spec import SamplingSpec

_PARAMS: Final = tuple(field.name for field in fields(SamplingParams))


def sampling_spec(spec: RequestSpec) -> SamplingSpec:
    """The engine's sampling settings of a request."""
    params = {name: getattr(spec.sampling, name) for name in _PARAMS}
    return SamplingSpec(resumed_tokens=spec.resumed_tokens, **params)


def told_logprobs(found: engine_logprobs.PositionLogprobs | None) -> PositionLogprobs | None:
    """One position's log-probabilities, as they are told to others; None stays None."""
    return None if found is None else PositionLogprobs(found.chosen, found.top)
