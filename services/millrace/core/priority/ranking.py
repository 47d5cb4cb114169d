"""What a policy is to those who use it: it ranks the requests of a queue.

A ranking belongs to one queue, or to the two queues of a pool (waiting, and sent to instances). It
is told which requests join and leave, and says from time to time which of its keys have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from millrace.core.live_request import LiveRequest
from millrace.core.weights import Weights

#: The smaller key goes first; equal keys go in order of submission.
PriorityKey = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetails:
    """Where a request stands under a policy, for people."""

    key: str  # in words
    attainment: float | None = None  # share of its class in time, of the last requests
    value: float | None = None  # of having it in time; 1 is usual
    stretch: float | None = None  # the multiple of its length that it may wait


class Ranking(Protocol):
    """The keys of some requests under one policy."""

    def add(self, request: LiveRequest, now_s: float) -> PriorityKey:
        """Takes a request in and returns its key."""

    def remove(self, request: LiveRequest) -> None:
        """Forgets a request that was taken in."""

    def replace(self, old: LiveRequest, new: LiveRequest) -> PriorityKey:
        """Takes `new` in, in the place of `old`, and returns its key."""

    def update(self, now_s: float, instances: int) -> Mapping[str, PriorityKey]:
        """Returns the keys that have changed, by request id. `instances` prefill instances work on
        the requests.
        """

    def key(self, request: LiveRequest, now_s: float) -> PriorityKey:
        """Returns the key that a request would get that is not taken in."""

    def part(self, key: PriorityKey) -> str:
        """Returns the part of the order that requests with such a key are in; empty if there is
        one order.
        """

    def describe(self, request: LiveRequest, key: PriorityKey, now_s: float) -> RankDetails:
        """Says where a request with this key stands."""


class Policy(Protocol):
    """One policy at work. Its rankings share what it learns."""

    @property
    def name(self) -> str: ...

    def ranking(self) -> Ranking:
        """Returns a ranking without requests."""

    def weigh(self, weights: Weights) -> None:
        """Takes other weights of classes and tenants from now on."""

    def started(self, request: LiveRequest) -> None:
        """Notes that a chunk of the request computes, for the first time or again."""

    def first_token(self, request: LiveRequest, now_s: float) -> None:
        """Notes that the request has its first token."""

    def finished(self, request: LiveRequest, now_s: float, tbt_s: float | None) -> None:
        """Notes that the answer is complete. tbt_s: its mean time between tokens, if known."""

    def ended(self, request: LiveRequest, now_s: float) -> None:
        """Notes that the request ended without a first token."""

    def value(self, request: LiveRequest) -> float:
        """Returns what it is worth to meet the request's objectives; about 1."""


class KeyPolicy:
    """A policy whose key depends on the request and the time alone: each of the papers'.

    A `static` policy's keys don't depend on the time either.
    """

    def __init__(
        self,
        name: str,
        key: Callable[[LiveRequest, float], PriorityKey],
        words: Callable[[LiveRequest, float], str],
        *,
        static: bool = False,
    ) -> None:
        self.name = name
        self._key = key
        self._words = words
        self._static = static

    def ranking(self) -> Ranking:
        return _KeyRanking(self._key, self._words, static=self._static)

    def weigh(self, weights: Weights) -> None:
        """Has no use for weights."""

    def started(self, request: LiveRequest) -> None:
        """Learns nothing."""

    def first_token(self, request: LiveRequest, now_s: float) -> None:
        """Learns nothing."""

    def finished(self, request: LiveRequest, now_s: float, tbt_s: float | None) -> None:
        """Learns nothing."""

    def ended(self, request: LiveRequest, now_s: float) -> None:
        """Learns nothing."""

    def value(self, request: LiveRequest) -> float:
        """Returns 1: all requests are worth the same."""
        del request
        return 1.0


class _KeyRanking:
    """Computes all keys again in every round, as the papers do."""

    def __init__(
        self,
        key: Callable[[LiveRequest, float], PriorityKey],
        words: Callable[[LiveRequest, float], str],
        *,
        static: bool,
    ) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._static = static
        self._now_s = 0.0
        self.key = key
        self._words = words

    def part(self, key: PriorityKey) -> str:
        del key
        return ""

    def describe(self, request: LiveRequest, key: PriorityKey, now_s: float) -> RankDetails:
        del key
        return RankDetails(key=self._words(request, now_s))

    def add(self, request: LiveRequest, now_s: float) -> PriorityKey:
        self._now_s = now_s
        self._requests[request.id] = request
        return self.key(request, now_s)

    def remove(self, request: LiveRequest) -> None:
        del self._requests[request.id]

    def replace(self, old: LiveRequest, new: LiveRequest) -> PriorityKey:
        self.remove(old)
        return self.add(new, self._now_s)

    def update(self, now_s: float, instances: int) -> Mapping[str, PriorityKey]:
        del instances
        self._now_s = now_s
        if self._static or len(self._requests) < 2:
            return {}
        return {name: self.key(request, now_s) for name, request in self._requests.items()}
