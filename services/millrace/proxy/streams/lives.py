"""How long resumable streams live, and how often their owners say that they do."""

from __future__ import annotations

from dataclasses import dataclass

RENEW_S = 1.0
#: A stream without a renewal for this long may be adopted by another replica.
LEASE_S = 5.0
#: The same without a renewal for this long, if the stream's request has ended: the scheduler
#: cancels it when the connection of the stream's proxy ends.
QUIET_S = 2.0
#: Time to release the streams at shutdown. A stream that is not released is lost with its lease.
CLOSE_S = 2.0
#: An owner that lives notices within this time that the store has lost a stream, and restores it.
RESTORED_S = 3 * RENEW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLives:
    """How long streams live, in seconds: without a client, at most, and after their ends."""

    grace_s: float
    ttl_s: float
    finished_ttl_s: float
