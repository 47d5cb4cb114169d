"""The messages of the two ends of a probe of the KV path (`proto/millrace/v1/transfer.proto`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEndpoint:
    """One end: its buffer and connection data, and the seed of the pattern that it expects."""

    agent_metadata: bytes
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProbe:
    """An instance's probe of another: `error` is empty if KV travels in both directions."""

    instance_id: str
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """An instance's facts for `millrace doctor`: its clock at the call, its KV's device, probes."""

    version: str
    unix_s: float
    device: str
    peers: Sequence[PeerProbe]
