"""Translates sampling settings and log-probabilities between plain types and the engine's types."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.token_events import PositionLogprobs
from millrace.engine.sampling import logprobs as engine_logprobs
from millrace.engine.sampling.spec import SamplingSpec

_PARAMS: Final = tuple(field.name for field in fields(SamplingParams))


def sampling_spec(spec: RequestSpec) -> SamplingSpec:
    """Builds the engine's sampling settings of a request."""
    params = {name: getattr(spec.sampling, name) for name in _PARAMS}
    return SamplingSpec(resumed_tokens=spec.resumed_tokens, **params)


def told_logprobs(found: engine_logprobs.PositionLogprobs | None) -> PositionLogprobs | None:
    """Converts one position's log-probabilities to the type for reports; None stays None."""
    return None if found is None else PositionLogprobs(found.chosen, found.top)
