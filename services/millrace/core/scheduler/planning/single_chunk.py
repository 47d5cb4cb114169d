"""Single-chunk placement: Tetris section 5.1, Algorithm 2 alone (the baseline of Figure 13).

The whole prompt is one chunk. From the smallest SP degree up, a larger group is chosen only when it
cuts the TTFT by more than the improvement rate. Groups are those of CDSP.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from millrace.core.scheduler.planning.cdsp import pool_planner
from millrace.core.scheduler.planning.plan import Plan

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


class SingleChunk:
    """Plans by Algorithm 2. `improvement_rate` may be set between two plans."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self.improvement_rate = inputs.config.improvement_rate
        self._planner = pool_planner(inputs)

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """One chunk on the group that Algorithm 2 settles on."""
        return self._planner.plan_single_chunk(tokens, queue_s, least_sp, self.improvement_rate)
