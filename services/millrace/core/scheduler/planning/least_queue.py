"""Least-queue placement: one chunk on the instance with the least predicted work ahead.

The work ahead is Tetris's queuing time of an instance (section 5.1). SP degree 1: one instance, one
chunk, which the engine cuts into forward passes itself.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


class LeastQueue:
    """Plans one chunk on one instance; ignores nodes and SP degrees."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self._latency = inputs.latency
        self._history = inputs.history

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """The whole prompt as one chunk; the lowest index wins among equals."""
        del least_sp
        best = queue_s.index(min(queue_s))
        ttft_s = queue_s[best] + self._latency.chunk_s(tokens, self._history)
        return Plan((PlannedChunk(tokens, (best,)),), ttft_s)
