"""Remaining prefill time of a long request under adaptive chunking: Medha appendix A.3, Alg. 3.

A prefill is run in chunks, each the largest that its worker computes within t_target on top of the
KV already there, so chunks shrink as the history grows. The time to prefill l tokens that way is
kept for every multiple of a granularity; what remains is C[total] - C[done].

Deviations. (1) Alg. 3 simulates each length again; but the chunks, except the last, don't depend on
the length, so one walk gives every entry. (2) Line 15 lets the last chunk run past the length; here
it is cut. (3) Line 16 gives up when no chunk fits t_target, which would leave a length without a
time; here the least chunk runs, late. (4) Lengths between entries are interpolated, and the walk
continues when a longer request is asked for. (5) With SPP the time is divided by the degree
(Mnemosyne section 4.3, Eq. (8), without the fill of the pipeline).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """Chunk sizes that adaptive chunking may choose: least to most, in steps of `step` tokens."""

    least: int = 32
    most: int = 8192
    step: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"least is {self.least}; it must be 1 to most ({self.most})")
        if self.step < 1:
            raise ConfigError(f"step is {self.step}; it must be 1 or more")


def optimal_chunk(
    operators: OperatorModel, history: int, target_s: float, limits: ChunkLimits, kvp: int = 1
) -> int:
    """The most tokens whose pass takes at most `target_s`, or `limits.least`; by binary search.

    Alg. 3, line 15 (Alg. 2, line 16 with an empty batch). A pass takes longer the more tokens it
    has, except for the noise of measured tables, at which the search may stop.
    """
    low, high = 0, (limits.most - limits.least) // limits.step
    while low < high:
        middle = (low + high + 1) // 2
        tokens = limits.least + middle * limits.step
        if operators.pass_s(BatchShape(prefills=((tokens, history),)), kvp) <= target_s:
            low = middle
        else:
            high = middle - 1
    return limits.least + low * limits.step


class PrefillTimes:
    """The cache C of Alg. 3: seconds to prefill any number of tokens.

    target_s: t_target. granularity: tokens between entries (the paper's delta). spp: SPP degree.
    """

    def __init__(
        self,
        operators: OperatorModel,
        *,
        target_s: float,
        granularity: int = 1024,
        limits: ChunkLimits | None = None,
        spp: int = 1,
    ) -> None:
        """Raises ConfigError for a target, granularity or degree that is not positive."""
        if not (math.isfinite(target_s) and target_s > 0.0):
            raise ConfigError(f"target_s is {target_s}; it must be finite and above 0")
        if granularity < 1:
            raise ConfigError(f"granularity is {granularity}; it must be 1 token or more")
        if spp < 1:
            raise ConfigError(f"spp is {spp}; it must be 1 or more")
        self._operators = operators
        self._target_s = target_s
        self._granularity = granularity
        self._limits = limits or ChunkLimits()
        self._spp = spp
        self._entries_s = [0.0]  # C: the i-th for i times the granularity
        self._chunk_start = 0  # of the current chunk of the walk, and the seconds until there
        self._start_s = 0.0
        self._chunk_end = 0

    def total_s(self, tokens: int) -> float:
        """Returns the seconds to prefill `tokens` from the first token, alone, on `spp` stages."""
        return self._cached_s(tokens) / self._spp

    def remaining_s(self, total: int, done: int) -> float:
        """Returns the seconds for the rest of a prefill of `total` tokens after `done` tokens."""
        return max(self._cached_s(total) - self._cached_s(done), 0.0) / self._spp

    def _cached_s(self, tokens: int) -> float:
        below, beyond = divmod(tokens, self._granularity)
        while len(self._entries_s) < below + 2:
            self._entries_s.append(self._simulated_s(len(self._entries_s) * self._granularity))
        low_s = self._entries_s[below]
        return low_s + beyond / self._granularity * (self._entries_s[below + 1] - low_s)

    def _simulated_s(self, tokens: int) -> float:
        """Runs SimulatePrefill of Alg. 3, continuing where the last, shorter length ended."""
        while self._chunk_end < tokens:
            if self._chunk_end > self._chunk_start:
                self._start_s += self._pass_s(self._chunk_end)
                self._chunk_start = self._chunk_end
            self._chunk_end = self._chunk_start + optimal_chunk(
                self._operators, self._chunk_start, self._target_s, self._limits
            )
        return self._start_s + self._pass_s(tokens)

    def _pass_s(self, end: int) -> float:
        chunk = (end - self._chunk_start, self._chunk_start)
        return self._operators.pass_s(BatchShape(prefills=(chunk,)))
