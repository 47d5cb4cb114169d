"""The request of a client, the states of a request, and the pieces that it is cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from millrace.core.incarnation import Incarnation

#: Decode keeps a prefix for the next attempt if it has at least this many tokens: fewer tokens are
#: computed in less time than it takes to write them back. An attempt that left this many tokens
#: more than it found does not count towards `max_attempts`, and its request is no suspect if an
#: instance died of it. So a long prompt survives many deaths, and a request that makes no progress
#: still ends.
MIN_KEPT_TOKENS: Final = 64


class RequestState(Enum):
    """The progress of a request, as the scheduler sees it."""

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

#: Every legal step: a state maps to the states that may follow it.
#: PREFILLING -> QUEUED is a new prefill after an instance died. Once all chunks are computed the
#: first token may be out, so no step leads back from TRANSFERRING. Decode and prefill report over
#: different streams. A report of decode may therefore overtake a report of prefill, and also the
#: event of prefill's death, which led back to QUEUED. A request whose first token is also its last
#: never decodes.
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
    """A request's objectives, in seconds; None where it has none.

    ttft_s: arrival to first token. tbt_s: mean time between tokens. e2e_s: arrival to last token.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None
    class_name: str = "default"

    def pace_s(self, first_token_s: float, answer_tokens: float) -> float:
        """Returns the longest mean time between tokens that keeps the TBT and the end-to-end
        objective; infinite where neither asks for one.

        first_token_s: from arrival. answer_tokens: that a choice is expected to have. An end-to-end
        objective that is over asks for none.
        """
        pace_s = self.tbt_s or math.inf
        if self.e2e_s and answer_tokens > 1.0 and self.e2e_s > first_token_s:
            pace_s = min(pace_s, (self.e2e_s - first_token_s) / (answer_tokens - 1.0))
        return pace_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of prompt tokens computed at once by one group of instances (Tetris section 3.1)."""

    index: int
    start_token: int
    num_tokens: int
    instance_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a client. `LiveRequest` holds it together with its progress."""

    id: str
    proxy_id: str
    prompt_tokens: int
    max_new_tokens: int
    choices: int = 1
    slo: Slo = field(default_factory=Slo)
    arrival_s: float = 0.0
    prefix_hashes: tuple[int, ...] = ()  # of the prompt's whole blocks (`kv.prefix`); none: unknown
    tenant: str = "default"
    priority: int = 0  # among its tenant's requests of its class; the smaller goes first
    resumable: bool = True  # an attempt may start after the tokens that earlier ones left at decode
    #: Lost instances at which the request was open, oldest first, by what its proxy knows.
    deaths: tuple[Incarnation, ...] = ()

    @property
    def prefill_only(self) -> bool:
        """Returns whether it generates no token: its result is computed from its prompt alone."""
        return self.max_new_tokens == 0
