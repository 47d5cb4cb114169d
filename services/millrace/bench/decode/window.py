"""Finds the part of a round of `millrace bench decode` in which every request decodes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.errors import MillraceError

_SPARE = 1.3  # share of the time that the warm-up's prompts took
_LEAST_STEP_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time in which every stream decodes: after `start_s`, until `end_s` inclusive."""

    start_s: float
    end_s: float
    tokens: int
    context_tokens: list[int]  # context tokens of each stream at its start

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.end_s - self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters at one moment: the decode instance's steps, and CPU seconds by process."""

    at_s: float
    steps: float
    step_s: float
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Milliseconds per step: in the step, between two steps, and of CPU by process."""

    step_ms: float
    between_steps_ms: float
    cpu_ms: dict[str, float]


def length_for(warm_up: Sequence[Sequence[tuple[float, int]]], steps: int) -> int:
    """Returns the tokens of each answer, so that the first has `steps` more after the last prompt.

    warm_up: (time, tokens) of each event of short answers, by stream.
    """
    begun = [events[0][0] for events in warm_up]
    # The median: the tokens of a short answer may reach the client all at once.
    step_s = statistics.median(
        (events[-1][0] - events[0][0]) / max(1, sum(tokens for _, tokens in events) - 1)
        for events in warm_up
    )
    behind = math.ceil(_SPARE * (max(begun) - min(begun)) / max(_LEAST_STEP_S, step_s))
    return steps + behind


def window_of(arrivals: Sequence[Sequence[tuple[float, int]]], prompt_tokens: int) -> Window:
    """Finds the window. arrivals: (time, tokens) of each event, by stream, which decodes from its
    second event on.

    Raises MillraceError when at no time all streams decode.
    """
    start_s = max((events[1][0] for events in arrivals if len(events) > 1), default=0.0)
    end_s = min(events[-1][0] for events in arrivals)
    if any(len(events) < 2 for events in arrivals) or start_s >= end_s:
        raise MillraceError("the first request ended before the last one decoded: raise --steps")
    counts = [sum(n for at, n in events if at <= start_s) for events in arrivals]
    within = sum(n for events in arrivals for at, n in events if start_s < at <= end_s)
    return Window(
        start_s=start_s,
        end_s=end_s,
        tokens=within,
        context_tokens=[prompt_tokens + count for count in counts],
    )


def costs_of(samples: Sequence[Sample], window: Window) -> Costs | None:
    """Returns the costs between the first and the last sample within the window."""
    inside = [s for s in samples if window.start_s <= s.at_s <= window.end_s]
    if len(inside) < 2 or (steps := inside[-1].steps - inside[0].steps) <= 0:
        return None
    first, last = inside[0], inside[-1]
    step_ms = 1e3 * (last.step_s - first.step_s) / steps
    return Costs(
        step_ms=step_ms,
        between_steps_ms=1e3 * (last.at_s - first.at_s) / steps - step_ms,
        cpu_ms={n: 1e3 * (last.cpu_s[n] - first.cpu_s[n]) / steps for n in last.cpu_s},
    )
