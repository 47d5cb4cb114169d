"""What the scheduler wants done.

Drivers (the live service, the simulator) carry effects out in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.request import Chunk, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Tell the proxy that the request is accepted and which decode instance emits its tokens."""

    request_id: str
    proxy_id: str
    decode_id: str
    predicted_ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell the proxy that the request is not accepted.

    code: overloaded | unavailable | too_large.
    """

    request_id: str
    proxy_id: str
    code: str
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Tell the proxy that an accepted request is over without its answer."""

    request_id: str
    proxy_id: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitDecode:
    """Tell the decode instance to reserve for the request. Comes before `RunPrefill`."""

    instance_id: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrefill:
    """Send the request's chunks to a prefill instance, behind what it already holds."""

    instance_id: str
    request_id: str
    chunks: tuple[Chunk, ...]
    decode_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOn:
    """Tell an instance to drop the request and free all it holds of it.

    Harmless when it holds nothing.
    """

    instance_id: str
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Write the request's new state to the request store, off the decision path."""

    request_id: str
    state: RequestState
    decode_id: str | None


Effect = Place | Refuse | Fail | AdmitDecode | RunPrefill | CancelOn | Record
