"""A decode batch as a fluid: its requests, their progress, and the time of the next steps.

Between two changes of its members a batch of n sequences takes steps whose time grows with the
context that they read. The profile's step time is taken at both ends of a span and interpolated by
a straight line, and the steps done by a time follow from a quadratic: no event per token. A
sequence that joins in the middle of a step takes part from the next step on. Very long spans are
cut (`HORIZON_STEPS`), so that the straight line holds.

Of sequences that are spread (`core.scheduler.fleet.kvp_placement`) each worker reads its own share
in a step. The step takes as long as the worker with the most tokens: the batch's own instance, or a
KVP worker of several sequences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

from millrace.core.kv.kvp_shards import Reservation
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.sharded_passes import held

#: Steps that one straight line covers at most.
HORIZON_STEPS = 512

#: A span that adds less than this share to the context is taken as level, at its middle's step
#: time.
LEVEL_SHARE = 0.02

_ROUNDING = 1e-6  # of a step


class Sequence:
    """A request in a batch.

    `spread`: the workers of its context, if it is not all at this instance.
    """

    __slots__ = ("computed", "end_step", "job", "joined_s", "spread")

    def __init__(self, job: Job, joined_s: float, end_step: int) -> None:
        self.job = job
        self.joined_s = joined_s
        self.end_step = end_step
        self.spread: Reservation | None = job.spread
        self.computed = 0  # tokens with KV, after it has left

    def context(self, steps: float) -> float:
        """The tokens that a step reads of it after so many more steps, its own token included."""
        plan = self.job.plan
        return plan.input_tokens + plan.output_tokens - (self.end_step - steps)


class Batch:
    """The sequences of one instance. Times and steps are those of the last `sync` or `advance`."""

    __slots__ = (
        "_ends",
        "_since_s",
        "_slope_s",
        "_spread",
        "_step_s",
        "_target",
        "_whole",
        "growth",
        "members",
        "steps",
    )

    def __init__(self) -> None:
        self.members: dict[str, Sequence] = {}
        self._whole = 0.0  # tokens that a step reads of the sequences that are all at this instance
        self.growth = 0.0  # tokens that a step adds to them
        self._spread: dict[str, tuple[Sequence, Reservation]] = {}
        self.steps = 0.0
        self._ends: list[tuple[int, str]] = []  # heap; also of sequences that left early
        self._since_s = 0.0
        self._step_s = 0.0  # at `_since_s`, and its growth per step
        self._slope_s = 0.0
        self._target = 0.0  # steps at the end of the planned span

    def __len__(self) -> int:
        return len(self.members)

    @property
    def context(self) -> float:
        """Returns the tokens that a step reads, at the worker with the most."""
        return self._whole if not self._spread else self._read(0.0)

    @property
    def degree(self) -> int:
        """Returns the workers of the most spread sequence, at present."""
        return max(
            (
                spread.degree(math.ceil(sequence.context(self.steps)))
                for sequence, spread in self._spread.values()
            ),
            default=1,
        )

    def join(self, job: Job, now_s: float) -> None:
        """Adds a request that has its first token and needs more; it takes part from now on."""
        plan = job.plan
        first = math.ceil(self.steps - _ROUNDING)
        end_step = first + plan.output_tokens - 1
        sequence = self.members[job.id] = Sequence(job, now_s, end_step)
        heappush(self._ends, (end_step, job.id))
        if sequence.spread is not None:
            self._spread[job.id] = sequence, sequence.spread
            return
        self._whole += plan.input_tokens + 1 - (first - self.steps)
        self.growth += 1.0

    def leave(self, request_id: str) -> Sequence:
        """Takes a sequence out, at its end or before."""
        sequence = self.members.pop(request_id)
        context = sequence.context(self.steps)
        sequence.computed = round(context) - 1
        if self._spread.pop(request_id, None) is None:
            self._whole -= context
            self.growth -= 1.0
        if not self.members:  # so rounding errors do not build up
            self._whole = self.growth = self.steps = 0.0
            self._ends.clear()
        return sequence

    def leave_ended(self) -> list[Sequence]:
        """Takes out all sequences that have their last token."""
        ended = []
        while self._ends and self._ends[0][0] <= self.steps + _ROUNDING:
            end_step, request_id = heappop(self._ends)
            sequence = self.members.get(request_id)
            if sequence is not None and sequence.end_step == end_step:
                ended.append(self.leave(request_id))
        return ended

    # ---- time

    def advance(self, steps: float) -> None:
        """Notes that so many steps were done."""
        self.steps += steps
        self._whole += steps * self.growth

    def plan(self, now_s: float, step_s: Callable[[Batch, float], float]) -> tuple[float, float]:
        """Plans the steps until the next end, from now on. The batch must not be empty.

        `step_s(batch, context)` predicts a step. Returns when the span ends, and the seconds of
        its last step.
        """
        members, ends = self.members, self._ends
        while ends[0][1] not in members or members[ends[0][1]].end_step != ends[0][0]:
            heappop(ends)
        steps = min(max(ends[0][0] - self.steps, _ROUNDING), HORIZON_STEPS)
        context = self.context
        added = self._read(steps) - context if self._spread else steps * self.growth
        if added < LEVEL_SHARE * context:
            first_s = last_s = step_s(self, context + added / 2.0)
        else:
            first_s = step_s(self, context)
            last_s = step_s(self, context + added)
        self._since_s = now_s
        self._step_s = first_s
        self._slope_s = slope_s = max((last_s - first_s) / steps, 0.0)
        self._target = self.steps + steps
        return now_s + steps * (first_s + slope_s * steps / 2.0), last_s

    def sync(self, now_s: float) -> float:
        """Does the steps of the planned span up to now; returns the seconds that passed."""
        elapsed_s = now_s - self._since_s
        self._since_s = now_s
        if not self.members or elapsed_s <= 0.0:
            return 0.0
        first_s = self._step_s
        root_s = math.sqrt(first_s * first_s + 2.0 * self._slope_s * elapsed_s)
        self.advance(2.0 * elapsed_s / (first_s + root_s))
        self._step_s = root_s  # the line's value at this point
        return elapsed_s

    def restart(self, now_s: float) -> None:
        """Makes `advance` count the steps from now on, until the next plan."""
        self._since_s = now_s

    def cut(self, now_s: float, part: int = 1) -> float:
        """Ends the planned span with the current step, or its next 1/`part`; returns when."""
        self.sync(now_s)
        steps = math.ceil((self.steps - _ROUNDING) * part) / part - self.steps
        if self._target - self.steps < steps:
            steps = self._target - self.steps
        self._target = self.steps + steps
        first_s = self._step_s
        return now_s + steps * (first_s + self._slope_s * steps / 2.0)

    def sync_to_end(self, now_s: float) -> float:
        """Does the steps up to the very end of the planned span; returns as `sync`."""
        elapsed_s = now_s - self._since_s
        self._since_s = now_s
        target = self._target
        self.advance(target - self.steps)
        if abs(target - round(target)) < _ROUNDING:
            self.steps = float(round(target))
        return elapsed_s

    def _read(self, steps: float) -> float:
        """Returns the value of `context` after so many steps."""
        here = self._whole + steps * self.growth
        there: defaultdict[str, float] = defaultdict(float)
        for sequence, spread in self._spread.values():
            (_, own), *others = held(spread, sequence.context(self.steps + steps))
            here += own
            for worker_id, tokens in others:
                there[worker_id] += tokens
        return max(here, *there.values()) if there else here
