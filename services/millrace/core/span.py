"""A bar of a request's TTFT waterfall, as services exchange it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One activity of an instance for a request, in seconds since the request's arrival at the
    proxy.
    """

    name: str  # queued, chunk, kv_transfer, first_decode_step, ...
    start_s: float
    end_s: float
    instance_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


#: A `Span` that its instance encoded once. The proxy decodes it when somebody asks for the
#: waterfall, which is rare.
EncodedSpan = bytes
