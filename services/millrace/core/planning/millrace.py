"""Millrace's own placement: no more instances than a request's deadline asks for.

Every planner of the papers minimises the request's own TTFT, CDSP with an improvement rate as a
brake. But a larger group does the same prompt with more instance-seconds (Tetris Table 1: 32k
tokens take 3.2 of them on one instance, 8.5 on sixteen), and what one request spends to be early,
another lacks to be in time. So:

1. Of the groups that CDSP would form, one for each SP degree, take those with which the request
   is done within `MARGIN` of the time left until its deadline (the rest is for what comes later and
   goes before it), and of these the one that costs least: seconds of computing times instances.
   Among equals the earlier end wins.
2. If no group is in time, plan as CDSP does: what is late should not become later.

Queue times count only work that goes before the request (`Board.queue_s`): what would yield to it
costs it nothing.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from millrace.core.planning.cdsp import Cdsp
from millrace.core.planning.cdsp_reference import usable_degrees
from millrace.core.planning.groups import by_node, get_group, shortest_first
from millrace.core.planning.plan import Plan, PlannedChunk

if TYPE_CHECKING:
    from millrace.core.planning import PlannerInputs

#: Share of the time until the deadline that a plan may use.
MARGIN = 0.7


class Millrace:
    """`improvement_rate`, for requests that can't be in time, may be set between two plans."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self._cdsp = Cdsp(inputs)
        self._latency = inputs.latency
        self._nodes = by_node(inputs.nodes)
        self._degrees = usable_degrees(inputs)

    @property
    def improvement_rate(self) -> float:
        return self._cdsp.improvement_rate

    @improvement_rate.setter
    def improvement_rate(self, rate: float) -> None:
        self._cdsp.improvement_rate = rate

    def plan(
        self, tokens: int, queue_s: array[float], least_sp: int = 1, budget_s: float = math.inf
    ) -> Plan:
        """One chunk on the cheapest group in time, or CDSP's chunks."""
        best: tuple[float, float] | None = None
        found: Plan | None = None
        nodes = shortest_first(self._nodes, queue_s)
        for sp in self._degrees:
            if sp < least_sp:
                continue
            compute_s = self._latency.chunk_s(tokens, 0, sp)
            if compute_s > MARGIN * budget_s:
                continue
            group = get_group(nodes, (), sp, queue_s)
            ttft_s = max(queue_s[i] for i in group) + compute_s
            cost = (sp * compute_s, ttft_s)
            if ttft_s <= MARGIN * budget_s and (best is None or cost < best):
                best, found = cost, Plan((PlannedChunk(tokens, group),), ttft_s)
        return found or self._cdsp.plan(tokens, queue_s, least_sp)
