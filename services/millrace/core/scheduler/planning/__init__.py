"""Placement of prefill work, one module per strategy.

A planner cuts a prompt into chunks and gives each a group of instances. It sees the instances of a
pool as indices 0..n-1 with a queue time each: the predicted seconds until an instance is free for
the request, counting only work that goes before it. Ties go to the lower index, so the same input
always gives the same plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import SpLatency
from millrace.core.scheduler.planning import cdsp, esp, fixed_sp, least_queue, single_chunk
from millrace.core.scheduler.planning.cdsp_reference import usable_degrees
from millrace.core.scheduler.planning.plan import Plan


class Planner(Protocol):
    """Plans one request at a time; the machine makes a new one when the pool's members change."""

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """Returns a plan for a prompt of `tokens` (1 or more).

        `queue_s` has one double per instance. Groups of the last chunk have at least `least_sp`
        members (memory asks for that), unless the pool has none of that size.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerInputs:
    """The inputs of a planner. `nodes[i]` numbers the node of instance i, from 0.

    `config.improvement_rate` is a rate, 0 or more: the pool has looked it up. `history`: tokens
    that are computed already, C of Eq. (1) for the first chunk; plans are of the tokens after them.
    """

    latency: SpLatency
    nodes: tuple[int, ...]
    config: SchedulerConfig
    history: int = 0


def _auto(inputs: PlannerInputs) -> Planner:
    """CDSP where there are groups to choose from."""
    if len(usable_degrees(inputs)) > 1:
        return cdsp.Cdsp(inputs)
    return least_queue.LeastQueue(inputs)


PLANNERS: Mapping[str, Callable[[PlannerInputs], Planner]] = MappingProxyType(
    {
        "auto": _auto,
        "least_queue": least_queue.LeastQueue,
        "fixed_sp": fixed_sp.FixedSp,
        "single_chunk": single_chunk.SingleChunk,
        "esp": esp.Esp,
        "cdsp": cdsp.Cdsp,
    }
)


def degrees_used(inputs: PlannerInputs) -> tuple[int, ...]:
    """Returns the SP degrees that the configured planner gives a group of this pool, ascending."""
    if inputs.config.planner == "least_queue":
        return (1,)
    if inputs.config.planner == "fixed_sp":
        return (fixed_sp.fixed_degree(inputs),)
    return usable_degrees(inputs)
