"""The stages of a request in its proxy."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """How far a request has come, as its proxy sees it."""

    SUBMITTED = "submitted"  # the scheduler has not answered yet
    QUEUED = "queued"  # the scheduler has it, and no decode instance has room yet
    PLACED = "placed"  # tokens will come from `decode`
    UNPLACED = "unplaced"  # its token stream broke before its first token: it must be placed again
    STREAMING = "streaming"  # tokens have come
    MOVING = "moving"  # its instance is gone: its next incarnation is being recorded
    PARKED = "parked"  # recorded; waits in the proxy for a fleet
    SPLIT = "split"  # its choices have been migrated, as a request each
    ENDED = "ended"
