"""Measures every case once, and cheap cases again while the budget lasts.

A round goes through all cases, so a slow phase of the machine affects one value of many cases, not
all values of one case. Each round has a new order, because earlier work leaves traces in the
caches. The budget limits the longest prompt: lengths double until a prompt takes too large a share
of it. From there to the end of the model's context, only attention grows: it is measured alone, in
chunks as long as the budget allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from millrace.core.cost.operators import BatchShape
from millrace.profiler.workload import Timing, Workload

#: Shares of the budget: for one prefill of the longest prompt (the first round takes about eight of
#: them), for the attention of one chunk beyond it, and for all repetitions of a case.
LONGEST_SHARE: Final = 1 / 20
FAR_SHARE: Final = 1 / 80
FAR_ENDS: Final = 4
REPEATS_SHARE: Final = 1 / 24
MOST_ROUNDS: Final = 7
LEAST_TOKENS: Final = 16
DECODE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
PREFILL_BATCHES: Final = (2, 8)
HELD_OUT_BATCHES: Final = (3, 5)
BATCHED_TOKENS: Final = 96
#: (chunk, history) of the held-out cases, as shares of the longest prompt: never fitted to.
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
#: Decodes as rows of a mixed pass, and chunks on histories beyond the longest prompt's, which cost
#: as many (query, key) pairs as that prompt.
ROWS: Final = (1, 4, 16, 64)
LONG_HISTORY_CHUNKS: Final = (32, 128, 512)
#: (chunk, history, decodes, contexts): all but the decodes are shares of the longest prompt.
HELD_OUT_MIXED: Final = (
    (0.5, 0.0, 8, 0.3),
    (0.25, 0.5, 16, 0.2),
    (0.12, 0.8, 4, 0.6),
    (0.06, 0.3, 32, 0.1),
    (0.75, 0.2, 2, 0.5),
    (0.03, 0.9, 12, 0.4),
)


@dataclass(frozen=True, slots=True, order=True)
class Prefill:
    """`batch` chunks of `tokens` on `history` each; several chunks are computed in one pass."""

    tokens: int
    history: int = 0
    batch: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Decode:
    """A step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True, order=True)
class Rows:
    """`batch` decodes on `context` tokens each, as rows of a mixed pass."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True, order=True)
class Mixed:
    """A chunk of `tokens` on `history` beside `decodes` on `context` tokens each, in one pass."""

    tokens: int
    history: int
    decodes: int
    context: int

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            prefills=((self.tokens, self.history),),
            decodes=self.decodes,
            decode_context_tokens=self.decodes * self.context,
        )


@dataclass(frozen=True, slots=True, order=True)
class Far:
    """The attention of a chunk of `tokens` on `history`, beyond the longest prompt."""

    tokens: int
    history: int

    @property
    def end(self) -> int:
        """The context in tokens after the chunk."""
        return self.tokens + self.history

    @property
    def pairs(self) -> float:
        """The number of (query, key) pairs: the chunk's own tokens make half of their square."""
        return self.tokens * (self.history + self.tokens / 2)


Case = Prefill | Decode | Rows | Mixed | Far


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Typical times of every case. `held_out`: cases that are never fitted to.

    prefills: with chunks on histories beyond the `longest` prompt; `prompts` are without them.
    far_s: seconds of all layers' attention, to the end of the context, as in wide chunks.
    """

    prefills: Mapping[Prefill, Timing]
    decode_s: Mapping[Decode, float]
    held_out: frozenset[Case]
    longest: int
    rounds: int
    spent_s: float
    rows: Mapping[Rows, Timing] = field(default_factory=dict)
    mixed_s: Mapping[Mixed, float] = field(default_factory=dict)
    far_s: Mapping[Far, float] = field(default_factory=dict)

    @property
    def prompts(self) -> Mapping[Prefill, Timing]:
        return {
            case: timing
            for case, timing in self.prefills.items()
            if case.tokens + case.history <= self.longest
        }


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
    far = far_cases(workload, longest, budget_s * FAR_SHARE, spent_s)
    fitted = dict.fromkeys([*_fitted(workload, longest), *far])
    held_out = frozenset(_held_out(workload, longest)) - fitted.keys()
    cases = [*fitted, *sorted(held_out, key=repr)]
    timings: dict[Case, list[Timing]] = {case: [] for case in cases}
    order = random.Random(0)
    rounds, due = 0, cases
    spent_on = dict.fromkeys(cases, 0.0)
    while due:
        order.shuffle(due)
        for case in due:
            start_case_s = spent_s()
            timings[case].append(_timed(workload, case))
            spent_on[case] += spent_s() - start_case_s
        rounds += 1
        after = {case: spent_on[case] * (rounds + 1) / rounds for case in due}
        due = [case for case in due if after[case] <= budget_s * REPEATS_SHARE]
        next_s = sum(spent_on[case] / rounds for case in due)
        if rounds == MOST_ROUNDS or spent_s() + next_s > budget_s:
            break
    total_s = spent_s()
    progress(1.0)
    found = {case: typical(taken) for case, taken in timings.items()}
    return Measured(
        prefills={case: t for case, t in found.items() if isinstance(case, Prefill)},
        decode_s={case: t.seconds for case, t in found.items() if isinstance(case, Decode)},
        rows={case: t for case, t in found.items() if isinstance(case, Rows)},
        mixed_s={case: t.seconds for case, t in found.items() if isinstance(case, Mixed)},
        far_s=as_wide({case: t.seconds for case, t in found.items() if isinstance(case, Far)}),
        held_out=held_out,
        longest=longest,
        rounds=rounds,
        spent_s=total_s,
    )


def _timed(workload: Workload, case: Case) -> Timing:
    """Times a case; decode steps, mixed passes and attention alone are not timed by operators."""
    match case:
        case Prefill(tokens, history, batch):
            return workload.prefill(tokens, history, batch)
        case Rows(batch, context):
            return workload.decode_rows(batch, context)
        case Decode(batch, context):
            seconds = workload.decode_step_s(batch, context)
        case Far(tokens, history):
            seconds = workload.attention_s(tokens, history)
        case Mixed(tokens, history, decodes, context):
            seconds = workload.mixed_s([(tokens, history)], [context] * decodes)
    return Timing(seconds=seconds, operators={}, passes=1)


def typical(timings: Sequence[Timing]) -> Timing:
    """Returns the `usual` seconds, divided in proportion to the operators' own usual seconds."""
    seconds = usual([timing.seconds for timing in timings])
    names = timings[0].operators
    parts = {name: usual([timing.operators[name] for timing in timings]) for name in names}
    scale = seconds / (sum(parts.values()) or 1.0)
    return Timing(
        seconds=seconds,
        operators={name: part * scale for name, part in parts.items()},
        passes=timings[0].passes,
    )


def usual(seconds: Sequence[float]) -> float:
    """Returns the lower quartile: other work on the machine only adds time, and the scheduler's
    online correction (`core/cost/correction.py`) handles lasting slowness.
    """
    return sorted(seconds)[len(seconds) // 4]


def _longest(workload: Workload, limit_s: float, spent_s: Callable[[], float]) -> int:
    """Finds the longest prompt whose prefill probably takes `limit_s` at most."""
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


def _fitted(workload: Workload, longest: int) -> Iterable[Case]:
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
    yield from _rows(workload, longest)
    yield from _long_histories(workload, longest)


def _held_out(workload: Workload, longest: int) -> Iterable[Case]:
    for share, history_share in HELD_OUT:
        tokens = round(share * longest)
        if tokens >= LEAST_TOKENS:
            yield Prefill(tokens, round(history_share * longest))
    for batch in HELD_OUT_BATCHES:
        yield from _together(workload, batch, longest)
    for batch, share in HELD_OUT_DECODE:
        yield from _step(workload, batch, round(share * longest))
    for chunk_share, history_share, decodes, context_share in HELD_OUT_MIXED:
        tokens = min(round(chunk_share * longest), workload.max_chunk_tokens)
        case = Mixed(
            tokens, round(history_share * longest), decodes, max(round(context_share * longest), 1)
        )
        lengths = [case.tokens + case.history, *[case.context] * decodes]
        if tokens and decodes <= workload.max_batch and workload.has_room_for(lengths):
            yield case


def _rows(workload: Workload, longest: int) -> Iterable[Rows]:
    for batch in ROWS:
        for context in (longest // 8, longest):
            context = max(context, LEAST_TOKENS)
            if batch <= workload.max_batch and workload.has_room_for([context] * batch):
                yield Rows(batch, context)


def _long_histories(workload: Workload, longest: int) -> Iterable[Prefill]:
    room = min(workload.max_tokens, workload.kv_tokens)
    for tokens in LONG_HISTORY_CHUNKS:
        history = min(longest * longest // (2 * tokens), room - tokens)
        if tokens <= min(room, workload.max_chunk_tokens) and tokens + history > longest:
            yield Prefill(tokens, history)


def far_cases(
    workload: Workload, longest: int, limit_s: float, spent_s: Callable[[], float]
) -> list[Far]:
    """Lists the longest chunks that take `limit_s` at most, at several ends: the context's end,
    half of it, and so on.

    Also lists chunks of the same lengths at the least end, for `as_wide`.
    """
    found: list[Far] = []
    most = min(workload.max_chunk_tokens, longest)
    tokens, end = min(LEAST_TOKENS, most), workload.context_tokens
    for _ in range(FAR_ENDS):
        if end <= longest:
            break
        while 2 * tokens <= most:
            start_s = spent_s()
            workload.attention_s(tokens, end - tokens)
            if 2 * (spent_s() - start_s) > limit_s:
                break
            tokens *= 2
        found.append(Far(tokens, end - tokens))
        end //= 2
    return [*found, *(Far(far.tokens, found[-1].end - far.tokens) for far in found[:-1])]


def as_wide(taken_s: Mapping[Far, float]) -> dict[Far, float]:
    """Scales each time to the cost per pair of the widest chunk: a narrow chunk reads as much K/V
    for fewer rows, but passes are wide. The scale comes from chunks of both widths at one end.
    """
    last = min((far.end for far in taken_s), default=0)
    pair_s = {far.tokens: s / far.pairs for far, s in taken_s.items() if far.end == last}
    widest = max(pair_s, default=0)
    return {
        far: seconds * pair_s[widest] / pair_s[far.tokens]
        for far, seconds in taken_s.items()
        if far.end > last or far.tokens == widest
    }


def _together(workload: Workload, batch: int, longest: int) -> Iterable[Prefill]:
    tokens = min(BATCHED_TOKENS, workload.max_chunk_tokens // batch, longest)
    if tokens and workload.has_room(batch, tokens):
        yield Prefill(tokens, 0, batch)


def _step(workload: Workload, batch: int, context: int) -> Iterable[Decode]:
    context = max(context, LEAST_TOKENS)
    if batch <= workload.max_batch and workload.has_room(batch, context):
        yield Decode(batch, context)


def _lengths(least: int, longest: int) -> Iterable[int]:
    """Yields `least`, doubled until `longest`, and one length in the middle of each gap."""
    tokens = least
    while tokens < longest:
        yield tokens
        middle = tokens + tokens // 2
        if tokens < middle < longest:
            yield middle
        tokens *= 2
    yield longest
