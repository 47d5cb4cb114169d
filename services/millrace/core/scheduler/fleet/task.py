"""The scheduler's task, as the run queue ranks it and instances hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.core.cost.correction import Band
from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey
from millrace.core.request import Chunk
from millrace.core.scheduler.effects import ChunkRef

if TYPE_CHECKING:
    from millrace.core.scheduler.fleet.instances import PrefillInstance

#: (policy's key, order of submission, chunk's index): a total order of tasks.
Rank = tuple[PriorityKey, int, int]


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """The scheduler's task: a chunk on its group of instances. An instance computes its share as a
    `ChunkTask`. `requests[0]` is the head: the task has its rank."""

    requests: list[LiveRequest]
    chunk: Chunk
    members: tuple[PrefillInstance, ...]  # leader first
    mask: int  # the members' bits
    modelled_s: float  # by the latency model
    predicted_s: float  # the same, corrected by what the members' computing took so far
    band: Band  # that the correction is of
    batched: bool = False
    is_alone: bool = False  # a whole prompt that found its members idle
    rank: Rank
    previous: Task | None = None  # the chunk that must be finished first
    executed_s: float = 0.0  # in spans already ended
    started_s: float | None = None  # since when it has been computing
    chosen: bool = False  # as far as the scheduler decides, it runs
    finished: bool = False
    refs: tuple[ChunkRef, ...] = ()  # its place in an order; made when first needed

    @property
    def ready(self) -> bool:
        return self.previous is None or self.previous.finished

    def remaining_s(self, now_s: float) -> float:
        left_s = self.predicted_s - self.executed_s
        if self.started_s is not None:
            left_s -= now_s - self.started_s
        return left_s if left_s > 0.0 else 0.0

    def named(self) -> tuple[ChunkRef, ...]:
        """Returns its place in an order."""
        if not self.refs:
            index = self.chunk.index
            refs = (ChunkRef(request_id=one.id, chunk_index=index) for one in self.requests)
            self.refs = tuple(refs)
        return self.refs


def masks(members: Iterable[PrefillInstance]) -> int:
    mask = 0
    for member in members:
        mask |= member.bit
    return mask
