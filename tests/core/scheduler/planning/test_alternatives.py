"""What one chunk would take on the best group of each degree."""

from __future__ import annotations

from array import array
from types import MappingProxyType

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.planning.alternatives import alternatives


def latency() -> SpLatency:
    """1 ms, 0.5 ms and 0.25 ms a token on 1, 2 and 4 instances."""
    return SpLatency(
        by_sp=MappingProxyType({sp: Latency(a=0.0, b=1e-3 / sp, c=0.0, d=0.0) for sp in (1, 2, 4)})
    )


def test_each_degree_takes_its_shortest_queues() -> None:
    queue_s = array("d", [3.0, 0.5, 1.0])
    found = alternatives(latency(), [0, 0, 0], 1000, queue_s)
    assert [(one.sp, one.members) for one in found] == [(1, (1,)), (2, (1, 2))]
    assert [one.ttft_s for one in found] == [0.5 + 1.0, 1.0 + 0.5]  # the ring waits for all
