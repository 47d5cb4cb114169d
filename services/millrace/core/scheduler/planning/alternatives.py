"""The plans that a request could have had: one chunk on the best group of each SP degree.

They answer why a plan was chosen; planners do not use them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from millrace.core.cost.latency import SpLatency
from millrace.core.scheduler.planning.groups import by_node, get_group, shortest_first


class Alternative(NamedTuple):
    """One chunk on a group of `sp` instances, named by their indices in the pool.

    `ttft_s` counts from now and includes the time in the queue.
    """

    sp: int
    ttft_s: float
    members: tuple[int, ...]


def alternatives(
    latency: SpLatency,
    nodes: Sequence[int],
    tokens: int,
    queue_s: array[float],
    history: int = 0,
) -> list[Alternative]:
    """Returns an alternative per SP degree that the pool can form, in ascending order.

    `nodes[i]` numbers the node of instance i, `queue_s[i]` is its queue time in seconds; `tokens`
    are computed after `history` tokens.
    """
    pool = shortest_first(by_node(nodes), queue_s)
    found = []
    for sp in (degree for degree in latency.degrees if degree <= len(nodes)):
        members = get_group(pool, (), sp, queue_s)
        waits_s = max(queue_s[member] for member in members)
        ttft_s = waits_s + latency.chunk_s(tokens, history, sp)
        found.append(Alternative(sp, ttft_s, members))
    return found
