"""Elastic sequence parallelism: LoongServe (Wu et al., SOSP 2024), one request at a time.

The baseline of Tetris section 7.1. Each request gets the SP degree with the least TTFT for itself,
whatever that costs the requests after it. LoongServe's cost model gives every degree
T = A + B sum(l) + C sum(l^2) over the lengths l of a batch; for one request without history that is
Eq. (1) with a, b, d for A, B, C, so the planners share their latency models. Instances are chosen
as for CDSP, and the lower degree wins among equals.

Deviations: no batches, as in Tetris's evaluation, and no shrinking to fewer instances for decoding,
which here has instances of its own (Tetris calls that LoongServe Disaggregated).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from millrace.core.scheduler.planning.cdsp import pool_planner
from millrace.core.scheduler.planning.plan import Plan

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


class Esp:
    """Algorithm 2 with an improvement rate of 0: any gain suffices."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self._planner = pool_planner(inputs)

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """One chunk on the group that ends it first."""
        return self._planner.plan_single_chunk(tokens, queue_s, least_sp, 0.0)
