"""The quickest plan of one chunk among instances that have the room.

For prompts that the configured planner can't place: chunks on a small group before a larger one
take more pages of its members than the last group's share, and the ring's buffers may make two
members need more than one. Rare, so in plain Python.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.core.scheduler.planning.groups import by_node, get_group, shortest_first, within
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs


def quickest_chunk(
    inputs: PlannerInputs,
    tokens: int,
    queue_s: array[float],
    able: Mapping[int, Sequence[bool]],
) -> Plan | None:
    """Returns one chunk on the group that ends it first, the smaller among equals; None without
    any.

    `able[sp][i]`: whether instance i can hold its share in a group of `sp`.
    """
    nodes = shortest_first(by_node(inputs.nodes), queue_s)
    best, best_s = None, math.inf
    for sp, can_hold in able.items():
        fitting = within(nodes, (i for i, can in enumerate(can_hold) if can))
        if sum(map(len, fitting)) < sp:
            continue
        group = get_group(fitting, (), sp, queue_s)
        end_s = max(queue_s[i] for i in group)
        end_s += inputs.latency.chunk_s(tokens, inputs.history, sp)
        if end_s < best_s:
            best, best_s = Plan((PlannedChunk(tokens, group),), end_s), end_s
    return best
