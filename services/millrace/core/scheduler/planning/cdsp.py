"""CDSP: Tetris section 5.1, Algorithms 1 to 3, in C++ (`kernels/planner`).

Decides to the last bit as `cdsp_reference.py`, which explains the algorithm: read that module.
Where the C++ module is not built, `cdsp_reference.py` plans, with a warning.
"""

from __future__ import annotations

import warnings
from array import array
from typing import TYPE_CHECKING, Protocol

from millrace.core.cost.latency import Latency, Segment
from millrace.core.errors import ConfigError
from millrace.core.scheduler.planning.cdsp_reference import (
    MIN_CHUNK_TOKENS,
    CdspReference,
    usable_degrees,
)
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

try:
    from millrace.core.scheduler.planning._cdsp import CdspPlanner
except ImportError as error:
    NOT_BUILT = str(error)
else:
    NOT_BUILT = ""

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


class PoolPlanner(Protocol):
    """Algorithms 1 and 2 on one pool, with the improvement rate of each plan."""

    def plan(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float, /
    ) -> Plan:
        """Algorithm 1."""

    def plan_single_chunk(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float, /
    ) -> Plan:
        """Algorithm 2."""


class InPython:
    """A PoolPlanner by `CdspReference`, for machines where the C++ module is not built."""

    def __init__(self, inputs: PlannerInputs, min_chunk_tokens: int) -> None:
        self._reference = CdspReference(inputs, min_chunk_tokens=min_chunk_tokens)

    def plan(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float, /
    ) -> Plan:
        """Algorithm 1."""
        self._reference.improvement_rate = improvement_rate
        return self._reference.plan(tokens, queue_s, least_sp)

    def plan_single_chunk(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float, /
    ) -> Plan:
        """Algorithm 2."""
        self._reference.improvement_rate = improvement_rate
        return self._reference.plan_single_chunk(tokens, queue_s, least_sp)


def pool_planner(inputs: PlannerInputs, min_chunk_tokens: int = MIN_CHUNK_TOKENS) -> PoolPlanner:
    """Returns the planner of a pool: in C++, or in Python with a warning where C++ is not built.

    The C++ planner keeps its working memory from plan to plan. It plans from history 0: history
    before that adds c C L to any chunk of L tokens (Eq. (1)), so it goes into each segment's b.
    """
    if min_chunk_tokens < 1:
        raise ConfigError(f"min_chunk_tokens is {min_chunk_tokens}; it must be at least 1")
    if NOT_BUILT:
        warnings.warn(
            f"CDSP plans in Python, many times slower than in C++ ({NOT_BUILT}): install a C++ "
            "compiler, then install Millrace again",
            RuntimeWarning,
            stacklevel=2,
        )
        return InPython(inputs, min_chunk_tokens)
    numbers = {node: at for at, node in enumerate(sorted(set(inputs.nodes)))}
    models = [(sp, inputs.latency.by_sp[sp]) for sp in usable_degrees(inputs)]
    return CdspPlanner(
        nodes=[numbers[node] for node in inputs.nodes],
        degrees=[(sp, model.c, _after(model, inputs.history)) for sp, model in models],
        min_chunk_tokens=min_chunk_tokens,
        plan_type=Plan,
        chunk_type=PlannedChunk,
    )


def _after(model: Latency, history: int) -> list[Segment]:
    return [(start, a, b + model.c * history, d) for start, a, b, d in model.segments]


class Cdsp:
    """Algorithm 1. `improvement_rate` may be set between two plans."""

    def __init__(self, inputs: PlannerInputs, *, min_chunk_tokens: int = MIN_CHUNK_TOKENS) -> None:
        self.improvement_rate = inputs.config.improvement_rate
        self._planner = pool_planner(inputs, min_chunk_tokens)

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """Returns chunks on growing groups. Members are listed in the order in which they were
        taken, so each group's list begins with that of the chunk before it and the leader never
        changes.
        """
        return self._planner.plan(tokens, queue_s, least_sp, self.improvement_rate)
