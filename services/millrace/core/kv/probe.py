"""The messages of the two ends of a probe of the KV path (`proto/millrace/v1/transfer.proto`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEndpoint:
    """One end: its buffer and connection data, and the seed of the pattern that it expects."""

    agent_metadata: bytes
    seed: int
