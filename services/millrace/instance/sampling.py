"""Builds the sampling settings of a request as the engine takes them."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.engine.sampling.spec import SamplingSpec

_PARAMS: Final = tuple(field.name for field in fields(SamplingParams))


def sampling_spec(spec: RequestSpec) -> SamplingSpec:
    """Builds the engine's sampling settings of a request."""
    params = {name: getattr(spec.sampling, name) for name in _PARAMS}
    return SamplingSpec(resumed_tokens=spec.resumed_tokens, **params)
