"""Says what would have brought a request's first token earlier, and by how much at most.

Each advice takes one wait away, or one part of the computing, and leaves all else as it was: the
seconds of several do not add up. Computing is predicted by the pool's latency model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.waits import COMPUTING, DECODE_ROOM, PREFILL, SUSPENDED, TURN

#: An advice that saves less than this is left out.
LEAST_S: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """One thing that would have helped, and the seconds that it saves at most."""

    what: str
    saves_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What an advice on computing needs to know. `group`: instances of its largest chunk, 0 before
    it has a plan."""

    tokens: int
    kept_tokens: int
    group: int


def helps(
    seconds: Mapping[tuple[str, str], float],
    prompt: Prompt,
    pool: Pool | None,
) -> tuple[Help, ...]:
    """Returns what would have helped most first. `seconds` are by (reason, part of the order);
    without a `pool` nothing is said of computing.
    """
    sums: dict[str, float] = {}
    for (reason, _), waited_s in seconds.items():
        sums[reason] = sums.get(reason, 0.0) + waited_s
    found = [
        Help(
            what="room at decode from the start: more decode memory",
            saves_s=sums.get(DECODE_ROOM, 0.0),
        ),
        Help(
            what="an idle prefill instance: more instances, or to go before others by the policy",
            saves_s=sums.get(PREFILL, 0.0) + sums.get(TURN, 0.0),
        ),
        Help(
            what="a policy under which those that suspended it wait for it",
            saves_s=sums.get(SUSPENDED, 0.0),
        ),
    ]
    if pool is not None and prompt.group and sums.get(COMPUTING):
        found += _of_computing(prompt, pool)
    return tuple(sorted((one for one in found if one.saves_s >= LEAST_S), key=lambda h: -h.saves_s))


def _of_computing(prompt: Prompt, pool: Pool) -> list[Help]:
    """Returns what a larger group and a cached prefix would have saved."""
    tokens, kept = prompt.tokens, prompt.kept_tokens
    as_it_was_s = pool.predicted_s(tokens, kept, prompt.group)
    half = kept + (tokens - kept) // 2
    found = [
        Help(
            what=f"a prefix cache that holds half of its prompt, {half} tokens",
            saves_s=as_it_was_s - pool.predicted_s(tokens, half, prompt.group),
        )
    ]
    larger = [sp for sp in pool.degrees if sp > prompt.group]
    if larger:
        best = min(larger, key=lambda sp: pool.predicted_s(tokens, kept, sp))
        saved_s = as_it_was_s - pool.predicted_s(tokens, kept, best)
        what = f"a group of {best} prefill instances instead of {prompt.group}"
        found.append(Help(what=what, saves_s=saved_s))
    return found
