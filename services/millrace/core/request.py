"""The one request object and the one table of its states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class RequestState(Enum):
    """Where a request is in its life, as the scheduler sees it."""

    QUEUED = "queued"  # accepted; no work was sent to a prefill instance yet
    PREFILLING = "prefilling"  # chunks are with prefill instances
    TRANSFERRING = "transferring"  # all chunks computed; KV still on its way to decode
    DECODING = "decoding"  # in a decode instance's batch
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]


_ENDS = frozenset({RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED})

#: Every legal step. A state maps to those that may follow it.
#: PREFILLING -> QUEUED is a re-prefill after a death. Once all chunks are computed token one may
#: be out, so nothing leads back from TRANSFERRING. Decode's news may overtake prefill's (they come
#: over different streams) and the news of prefill's death, which led back to QUEUED; a request
#: whose first token is also its last never decodes.
TRANSITIONS: MappingProxyType[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        RequestState.QUEUED: frozenset({RequestState.PREFILLING, RequestState.DECODING}) | _ENDS,
        RequestState.PREFILLING: frozenset(
            {RequestState.QUEUED, RequestState.TRANSFERRING, RequestState.DECODING}
        )
        | _ENDS,
        RequestState.TRANSFERRING: frozenset({RequestState.DECODING}) | _ENDS,
        RequestState.DECODING: _ENDS,
        RequestState.FINISHED: frozenset(),
        RequestState.FAILED: frozenset(),
        RequestState.CANCELLED: frozenset(),
    }
)


class IllegalTransition(Exception):
    """An event asked for a step that `TRANSITIONS` does not hold: a defect, never bad input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Token positions [start_token, end_token) of a request, at one worker."""

    worker_id: str
    start_token: int
    end_token: int

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.start_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A request's objectives, in seconds; None where it has none."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    class_name: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of prompt tokens computed at once by one group of instances (Tetris section 3.1)."""

    index: int
    start_token: int
    num_tokens: int
    instance_ids: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request for its whole life.

    `Machine` alone writes to it, `advance` alone sets its state.
    """

    id: str
    proxy_id: str
    prompt_tokens: int
    max_new_tokens: int
    choices: int = 1
    slo: Slo = field(default_factory=Slo)
    arrival_s: float = 0.0
    order: int = 0  # of submission, counted by `Machine`; tells equal arrivals apart

    state: RequestState = RequestState.QUEUED
    chunks: tuple[Chunk, ...] = ()
    chunks_done: int = 0
    decode_id: str | None = None
    shards: tuple[Shard, ...] = ()  # where its KV is, the first at `decode_id`; none: all there
    prefix_hashes: tuple[int, ...] = ()  # of the prompt's whole blocks (`prefix`); none: not shared
    resumable: bool = True  # an attempt may go on behind what earlier ones left at decode
    attempt: int = 0  # number of the last one that decode was told of
    attempts: int = 0  # sent to prefill, without those that left decode more than they found
    kept_tokens: int = 0  # first tokens whose KV decode keeps for this attempt: chunks begin there
    landed_tokens: int = 0  # first tokens whose KV decode has, as it last said
    dispatched_s: float | None = None
    first_token_s: float | None = None
    token_out_s: float | None = None  # when decode sent token one to the proxy
    computed_alone_s: float | None = None  # in one piece, behind nobody
    finished_s: float | None = None
    #: Seconds of prefill as predicted for its plan (before it has one: alone on an idle cluster).
    predicted_prefill_s: float = 0.0
    #: The same in seconds times instances (before it has a plan: on the smallest group).
    predicted_work_s: float = 0.0
    deadline_s: float = math.inf  # of token one, by the same clock as `arrival_s`
    executed_s: float = 0.0  # predicted seconds of prefill that stretches already ended have done
    running_since_s: float | None = None  # since when a chunk of it has been computing

    @property
    def goes_on(self) -> bool:
        """Whether decode keeps what earlier attempts left, and not what is in its prefix cache."""
        return self.kept_tokens > 0 and self.attempt > 1

    @property
    def holders(self) -> tuple[str, ...]:
        """Instances that keep its KV to its end: the home, and who holds shards for it."""
        if self.shards:
            return tuple(shard.worker_id for shard in self.shards)
        return () if self.decode_id is None else (self.decode_id,)

    def remaining_s(self, now_s: float) -> float:
        """Predicted seconds of prefill still to compute: work already executed counts as done."""
        left_s = self.predicted_prefill_s - self.executed_s
        if self.running_since_s is not None:
            left_s -= now_s - self.running_since_s
        return left_s if left_s > 0.0 else 0.0

    def remaining_work_s(self, now_s: float) -> float:
        """Predicted seconds of prefill still to compute, times the instances of the group."""
        return self.work_of(self.remaining_s(now_s))

    def work_of(self, left_s: float) -> float:
        """So many of its predicted seconds, times the instances of the group."""
        if self.predicted_prefill_s <= 0.0:
            return self.predicted_work_s
        return self.predicted_work_s * left_s / self.predicted_prefill_s

    def advance(self, state: RequestState) -> None:
        """Moves to `state`. Raises IllegalTransition when `TRANSITIONS` does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {state.value}")
        self.state = state
