"""The results of planners."""

from __future__ import annotations

from typing import NamedTuple


class PlannedChunk(NamedTuple):
    """A run of prompt tokens and the indices of the instances that compute it, leader first."""

    num_tokens: int
    members: tuple[int, ...]


class Plan(NamedTuple):
    """Chunks in order, each group holding the ones before it, and the predicted seconds to the end.

    `ttft_s` counts from now and includes the time in the queue.
    """

    chunks: tuple[PlannedChunk, ...]
    ttft_s: float
