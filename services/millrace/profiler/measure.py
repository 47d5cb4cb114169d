"""What is measured, and how often: every case once, and cheap ones again while the budget lasts.

A round goes through all cases, so that a slow spell of the machine touches one value of many
cases rather than all values of one, and in a new order, for what ran before leaves its traces in
the caches. The longest prompt is chosen by the budget: lengths double
until a prompt takes too large a part of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millrace.profiler.workload import Timing, Workload

#: Of the budget: what one prefill of the longest prompt may take (the first round takes some eight
#: of them), and what all repetitions of a case may.
LONGEST_SHARE: Final = 1 / 20
REPEATS_SHARE: Final = 1 / 24
MOST_ROUNDS: Final = 7
LEAST_TOKENS: Final = 16
DECODE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
PREFILL_BATCHES: Final = (2, 8)
HELD_OUT_BATCHES: Final = (3, 5)
BATCHED_TOKENS: Final = 96
#: (chunk, history) as shares of the longest prompt: what nothing is fitted to.
HELD_OUT: Final = (
    (0.85, 0.0),
    (0.42, 0.33),
    (0.21, 0.0),
    (0.21, 0.6),
    (0.11, 0.15),
    (0.07, 0.45),
    (0.04, 0.0),
    (0.04, 0.8),
)
HELD_OUT_DECODE: Final = ((1, 0.5), (3, 0.3), (12, 0.6), (48, 0.2))  # (batch, context as a share)


@dataclass(frozen=True, slots=True, order=True)
class Prefill:
    """`batch` chunks of `tokens` on `history` each; more than one are computed in one pass."""

    tokens: int
    history: int = 0
    batch: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Decode:
    """A step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Typical times of every case. `held_out`: those that nothing is to be fitted to."""

    prefills: Mapping[Prefill, Timing]
    decode_s: Mapping[Decode, float]
    held_out: frozenset[Prefill | Decode]
    longest: int
    rounds: int
    spent_s: float


def measure(
    workload: Workload, budget_s: float, progress: Callable[[float], None] = lambda share: None
) -> Measured:
    """Measures for about `budget_s` seconds, one round at least.

    `progress` gets the share of the budget that is used, 0 to 1.
    """
    start_s = time.perf_counter()

    def spent_s() -> float:
        now_s = time.perf_counter() - start_s
        progress(min(now_s / budget_s, 1.0))
        return now_s

    longest = _longest(workload, budget_s * LONGEST_SHARE, spent_s)
    fitted = dict.fromkeys(_fitted(workload, longest))
    held_out = frozenset(_held_out(workload, longest)) - fitted.keys()
    cases = [*fitted, *sorted(held_out, key=repr)]
    timings: dict[Prefill, list[Timing]] = {c: [] for c in cases if isinstance(c, Prefill)}
    steps_s: dict[Decode, list[float]] = {c: [] for c in cases if isinstance(c, Decode)}
    order = random.Random(0)
    rounds, due = 0, cases
    spent_on = dict.fromkeys(cases, 0.0)
    while due:
        order.shuffle(due)
        for case in due:
            start_case_s = spent_s()
            if isinstance(case, Prefill):
                timings[case].append(workload.prefill(case.tokens, case.history, case.batch))
            else:
                steps_s[case].append(workload.decode_step_s(case.batch, case.context))
            spent_on[case] += spent_s() - start_case_s
        rounds += 1
        after = {case: spent_on[case] * (rounds + 1) / rounds for case in due}
        due = [case for case in due if after[case] <= budget_s * REPEATS_SHARE]
        next_s = sum(spent_on[case] / rounds for case in due)
        if rounds == MOST_ROUNDS or spent_s() + next_s > budget_s:
            break
    total_s = spent_s()
    progress(1.0)
    return Measured(
        prefills={case: typical(found) for case, found in timings.items()},
        decode_s={case: usual(found) for case, found in steps_s.items()},
        held_out=held_out,
        longest=longest,
        rounds=rounds,
        spent_s=total_s,
    )


def typical(timings: Sequence[Timing]) -> Timing:
    """`usual` seconds, divided over the operators as their own usual seconds say."""
    seconds = usual([timing.seconds for timing in timings])
    names = timings[0].operators
    parts = {name: usual([timing.operators[name] for timing in timings]) for name in names}
    scale = seconds / sum(parts.values())
    return Timing(
        seconds=seconds,
        operators={name: part * scale for name, part in parts.items()},
        passes=timings[0].passes,
    )


def usual(seconds: Sequence[float]) -> float:
    """The lower quartile: what else the machine does only adds, and the scheduler's online
    correction (`core/correction.py`) is there for what lasts.
    """
    return sorted(seconds)[len(seconds) // 4]


def _longest(workload: Workload, limit_s: float, spent_s: Callable[[], float]) -> int:
    """The longest prompt whose prefill is likely to take `limit_s` at most; all, twice, warm."""
    length = min(LEAST_TOKENS, workload.max_tokens)
    workload.prefill(length)  # the first pass pays one-time costs
    while True:
        seconds = workload.prefill(length).seconds
        spent_s()
        following = min(2 * length, workload.max_tokens)
        # Attention grows with the square.
        if following == length or seconds * (following / length) ** 2 > limit_s:
            return length
        length = following


def _fitted(workload: Workload, longest: int) -> Iterable[Prefill | Decode]:
    for tokens in _lengths(min(LEAST_TOKENS, workload.max_chunk_tokens, longest), longest):
        yield Prefill(tokens)
    for tokens in (longest >> 1, longest >> 2, longest >> 3, longest >> 5, longest >> 7):
        for history in (longest // 4, longest // 2, 3 * longest // 4):
            if tokens >= LEAST_TOKENS and tokens + history <= longest:
                yield Prefill(tokens, history)
    for batch in PREFILL_BATCHES:
        yield from _together(workload, batch, longest)
    for batch in DECODE_BATCHES:
        for context in (longest // 8, longest):
            yield from _step(workload, batch, context)


def _held_out(workload: Workload, longest: int) -> Iterable[Prefill | Decode]:
    for share, history_share in HELD_OUT:
        tokens = round(share * longest)
        if tokens >= LEAST_TOKENS:
            yield Prefill(tokens, round(history_share * longest))
    for batch in HELD_OUT_BATCHES:
        yield from _together(workload, batch, longest)
    for batch, share in HELD_OUT_DECODE:
        yield from _step(workload, batch, round(share * longest))


def _together(workload: Workload, batch: int, longest: int) -> Iterable[Prefill]:
    tokens = min(BATCHED_TOKENS, workload.max_chunk_tokens // batch, longest)
    if tokens and workload.has_room(batch, tokens):
        yield Prefill(tokens, 0, batch)


def _step(workload: Workload, batch: int, context: int) -> Iterable[Decode]:
    context = max(context, LEAST_TOKENS)
    if batch <= workload.max_batch and workload.has_room(batch, context):
        yield Decode(batch, context)


def _lengths(least: int, longest: int) -> Iterable[int]:
    """`least`, doubled until `longest`, with one more in the middle of each gap."""
    tokens = least
    while tokens < longest:
        yield tokens
        middle = tokens + tokens // 2
        if tokens < middle < longest:
            yield middle
        tokens *= 2
    yield longest
