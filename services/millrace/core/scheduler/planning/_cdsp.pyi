from array import array
from collections.abc import Sequence

from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

class CdspPlanner:
    """Algorithms 1 to 3 on one pool. Not for two threads at once.

    nodes: of each instance, numbered from 0 without gaps. degrees: (SP degree, c, segments) of each
    latency model, ascending, none larger than the pool; a segment is (first token count, a, b, d).
    ValueError for arguments that don't hold this, and from both plans for `tokens` below 1 or a
    `queue_s` with NaN or of another length than the pool; TypeError if it isn't of doubles.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        degrees: Sequence[tuple[int, float, Sequence[tuple[int, float, float, float]]]],
        min_chunk_tokens: int,
        plan_type: type[Plan],
        chunk_type: type[PlannedChunk],
    ) -> None: ...
    def plan(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float
    ) -> Plan: ...
    def plan_single_chunk(
        self, tokens: int, queue_s: array[float], least_sp: int, improvement_rate: float
    ) -> Plan: ...
