"""Placement of prefill work, one module a strategy.

A planner is a function of (request, instances that have room for it, now in seconds) to the
request's chunks with the instances that compute each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from millrace.core.cluster import PrefillInstance
from millrace.core.planning import least_queue
from millrace.core.request import Chunk, Request

Planner = Callable[[Request, Sequence[PrefillInstance], float], tuple[Chunk, ...]]

PLANNERS: Mapping[str, Planner] = MappingProxyType({"least_queue": least_queue.plan})
