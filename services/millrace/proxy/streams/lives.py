"""How long resumable streams live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLives:
    """How long streams live, in seconds: without a client, at most, and after their ends."""

    grace_s: float
    ttl_s: float
    finished_ttl_s: float
