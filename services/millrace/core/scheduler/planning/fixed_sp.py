"""Fixed SP: the pool cut into groups of one size (baseline of Tetris section 7.1).

A group's members are on one node where possible. A request goes whole to the group with the lowest
queue delay. `least_sp` changes nothing: there is one size.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from millrace.core.scheduler.planning.cdsp_reference import usable_degrees
from millrace.core.scheduler.planning.groups import fixed_groups
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


def fixed_degree(inputs: PlannerInputs) -> int:
    """The largest degree of the latency model within `config.fixed_sp` and the pool."""
    degrees = usable_degrees(inputs)
    return max((sp for sp in degrees if sp <= inputs.config.fixed_sp), default=degrees[0])


class FixedSp:
    """Plans on fixed groups. Instances at the end of the pool too few for a group stay idle."""

    def __init__(self, inputs: PlannerInputs) -> None:
        degree = fixed_degree(inputs)
        self._latency = inputs.latency.by_sp[degree]
        self._history = inputs.history
        self._groups = fixed_groups(inputs.nodes, degree)

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """One chunk; the first group wins among equals."""
        del least_sp
        delays_s = [max(queue_s[i] for i in group) for group in self._groups]
        best = min(range(len(delays_s)), key=delays_s.__getitem__)
        ttft_s = delays_s[best] + self._latency.chunk_s(tokens, self._history)
        return Plan((PlannedChunk(tokens, self._groups[best]),), ttft_s)
