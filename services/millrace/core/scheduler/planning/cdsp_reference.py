"""CDSP planning in plain Python: Tetris section 5.1, Algorithms 1 to 3, Eq. (1) and (2).

The oracle of the planner in C++ (`cdsp.py`), which decides the same to the last bit; nothing is
left out or remembered here. Symbols: L tokens without a chunk yet, C tokens before them, A the
chunks so far, S the SP degrees to choose from, P the pool, T_i an instance's queue in seconds.

Deviations, each where the paper leaves room:

- Time runs on one clock from the plan's start. Eq. (2) sets T_i to max(0, T_i - elapsed) for the
  next chunk; here T_i stays and a group starts at max(elapsed, T_i), which is the same moment.
  Instances that are free by then are equals in Eq. (2), and the one that was free first is taken.
- Illegal chunks (Algorithm 1, line 11) are those without a positive budget or token; those shorter
  than `min_chunk_tokens`; and those that don't pay: with the chunk done, the rest would take the
  next group as long as all of it would without, and both start at the same time. A chunk of all
  that is left is a whole plan, and legal when its group is large enough for the last one.
- `least_sp`: Algorithm 2, which gives the last chunk its group, only tries degrees of at least
  `least_sp`; if the pool has none, its largest.
- The first degree that Algorithm 2 tries is taken whatever the rate.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.core.errors import ConfigError
from millrace.core.scheduler.planning.groups import (
    Group,
    Nodes,
    by_node,
    get_group,
    shortest_first,
    within,
)
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk

if TYPE_CHECKING:
    from millrace.core.scheduler.planning import PlannerInputs

#: A shorter forward pass does not fill a GPU, and its gain is less than the fixed cost of a chunk.
MIN_CHUNK_TOKENS = 512


def usable_degrees(inputs: PlannerInputs) -> tuple[int, ...]:
    """The latency model's SP degrees that the pool can form, ascending. ConfigError if none."""
    size = len(inputs.nodes)
    degrees = tuple(sp for sp in inputs.latency.degrees if sp <= size)
    if not degrees:
        raise ConfigError(f"nodes has {size} instances; there must be at least 1")
    return degrees


def last_degrees(degrees: Sequence[int], least_sp: int) -> tuple[int, ...]:
    """Returns the degrees that the last chunk may have."""
    return tuple(sp for sp in degrees if sp >= least_sp) or tuple(degrees[-1:])


@dataclass(frozen=True, slots=True)
class Allocation:
    """A: the chunks so far, and when the last one ends."""

    chunks: tuple[PlannedChunk, ...] = ()
    end_s: float = 0.0
    history: int = 0  # tokens before the first chunk

    @property
    def tokens(self) -> int:
        return self.history + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def group(self) -> Group:
        """Returns every instance so far: groups hold those before them."""
        return self.chunks[-1].members if self.chunks else ()

    def append(self, tokens: int, group: Group, end_s: float) -> Allocation:
        return Allocation((*self.chunks, PlannedChunk(tokens, group)), end_s, self.history)


class CdspReference:
    """Algorithms 1 to 3 as they are written. `improvement_rate` may be set between two plans."""

    def __init__(self, inputs: PlannerInputs, *, min_chunk_tokens: int = MIN_CHUNK_TOKENS) -> None:
        self.improvement_rate = inputs.config.improvement_rate
        self._models = inputs.latency.by_sp
        self._nodes = by_node(inputs.nodes)
        self._degrees = usable_degrees(inputs)
        self._min_chunk_tokens = min_chunk_tokens
        self._begun = Allocation(history=inputs.history)

    def plan(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """Algorithm 1."""
        last = last_degrees(self._degrees, least_sp)
        found = _Search(self, queue_s, last).schedule(
            tokens, self._begun, self._degrees, shortest_first(self._nodes, queue_s)
        )
        return Plan(found.chunks, found.end_s)

    def plan_single_chunk(self, tokens: int, queue_s: array[float], least_sp: int = 1) -> Plan:
        """Algorithm 2."""
        last = last_degrees(self._degrees, least_sp)
        found = _Search(self, queue_s, last).single_chunk(
            tokens, self._begun, self._degrees, shortest_first(self._nodes, queue_s)
        )
        return Plan(found.chunks, found.end_s)


class _Search:
    """The algorithms for one request."""

    def __init__(
        self, planner: CdspReference, queue_s: Sequence[float], last: tuple[int, ...]
    ) -> None:
        self._models = planner._models
        self._rate = planner.improvement_rate
        self._min_chunk_tokens = planner._min_chunk_tokens
        self._queue_s = queue_s
        self._last = last

    def schedule(
        self, left: int, done: Allocation, degrees: Sequence[int], pool: Nodes
    ) -> Allocation:
        """Algorithm 1: returns the best allocation found of all tokens."""
        best = self.single_chunk(left, done, degrees, pool)
        pool = within(pool, best.group)
        candidates = [sp for sp in degrees if sp <= len(best.group)]
        for current, following in itertools.combinations(candidates, 2):
            found = self._chunk(left, done, current, following, pool)
            if found is None:
                continue
            if rest := left - found.chunks[-1].num_tokens:
                wider = [sp for sp in candidates if sp >= following]
                found = self.schedule(rest, found, wider, pool)
            if found.end_s < best.end_s:
                best = found
        return best

    def single_chunk(
        self, left: int, done: Allocation, degrees: Sequence[int], pool: Nodes
    ) -> Allocation:
        """Algorithm 2: returns the rest as one chunk, with a larger group only for a gain above the
        rate.
        """
        best, best_ttft_s = None, 0.0
        for sp in degrees:
            if sp not in self._last:
                continue
            group = get_group(pool, done.group, sp, self._queue_s)
            end_s = self._start_s(group, done) + self._models[sp].chunk_s(left, done.tokens)
            ttft_s = end_s - done.end_s
            if best is None or ttft_s < best_ttft_s * (1.0 - self._rate):
                best, best_ttft_s = done.append(left, group, end_s), ttft_s
        assert best is not None  # the largest of `degrees` is always among the last ones
        return best

    def _chunk(
        self, left: int, done: Allocation, current: int, following: int, pool: Nodes
    ) -> Allocation | None:
        """Algorithm 3: returns a chunk that fills the time until the next group is free; None:
        illegal.
        """
        group = get_group(pool, done.group, current, self._queue_s)
        next_group = get_group(pool, group, following, self._queue_s)
        start_s = self._start_s(group, done)
        budget_s = self._start_s(next_group, done) - start_s
        if not budget_s > 0.0:
            return None
        history, model = done.tokens, self._models[current]
        tokens = min(left, model.tokens_within(budget_s, history))
        if tokens < self._min_chunk_tokens:
            return None
        if tokens == left:
            pays = current in self._last
        else:
            after = self._models[following]
            pays = after.chunk_s(left - tokens, history + tokens) < after.chunk_s(left, history)
        if not pays:
            return None
        return done.append(tokens, group, start_s + model.chunk_s(tokens, history))

    def _start_s(self, group: Group, done: Allocation) -> float:
        """Returns T_queue of Algorithms 2 and 3: when the last member is free."""
        return max(done.end_s, *(self._queue_s[i] for i in group))
