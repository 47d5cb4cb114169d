"""Latency of a prefill chunk: Tetris section 5.1, Eq. (1), corrected by measured points.

T_s = a_s + b_s L + c_s C L + d_s L^2 in seconds, L the chunk's tokens, C the history's, s the SP
degree. The paper plans on the smooth fit alone. Deviation: where a profile has measured points the
model runs through them, since the fit of Table 1 misorders SP 8 and 16 at 32k tokens, and the
examples of section 2.4 hold only with the table itself.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from millrace.core.errors import ConfigError

#: The largest result of `tokens_within`: more tokens than any request has.
MOST_TOKENS = 1 << 40

#: (first token count it holds for, a, b, d): a + b L + d L^2 seconds from there on.
Segment = tuple[int, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """seconds = a + b L + c C L + d L^2 of one SP degree (Tetris Eq. (1)).

    `points` are measured (tokens, seconds) without history, both ascending. The model is exact at
    them. Between two points it is the quadratic through both with curvature `d`, or a smaller
    curvature where the curve would fall. Outside the points it is the fit, shifted to meet the
    outermost point (and to 0 seconds at 0 tokens if it would otherwise be negative at one token).
    History always adds c C L. `segments` lists these pieces, ascending, the first from 0.

    The defaults are an order of magnitude for an instance that reported nothing: 1 ms per token.

    Raises ConfigError for coefficients that are not finite and 0 or more, and for points that do
    not ascend.
    """

    a: float = 0.0
    b: float = 1e-3
    c: float = 0.0
    d: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("a", "b", "c", "d"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"latency.{name} is {value}; it must be finite and 0 or more")
        _check_points(self.points)
        segments = _segments(self.a, self.b, self.d, self.points)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "_starts", tuple(segment[0] for segment in segments))

    def chunk_s(self, tokens: int, history: int = 0) -> float:
        """Returns the predicted seconds to compute `tokens` (1 or more) after `history` tokens."""
        starts = self._starts
        at = bisect_right(starts, tokens) - 1 if len(starts) > 1 else 0
        _, a, b, d = self.segments[at]
        return a + tokens * (b + self.c * history + d * tokens)

    def tokens_within(self, budget_s: float, history: int = 0) -> int:
        """Returns the largest L with chunk_s(L, history) <= budget_s; 0 if not even one token fits.

        Tetris Alg. 3, line 13. Deviation: the paper solves Eq. (1) numerically; a segment is a
        quadratic in L, so its root has a closed form, and the integers next to it settle the
        rounding. At most `MOST_TOKENS`, for a model that never grows.
        """
        if self.chunk_s(1, history) > budget_s:
            return 0
        at = len(self.segments) - 1
        while at > 0 and self.chunk_s(self._starts[at], history) > budget_s:
            at -= 1
        start, a, b, d = self.segments[at]
        last = at + 1 == len(self.segments)
        end = MOST_TOKENS if last else self._starts[at + 1] - 1
        root = _root(a - budget_s, b + self.c * history, d)
        guess = max(start, 1, int(root)) if root < end else end
        return self._settle(guess, max(start, 1), end, budget_s, history)

    def _settle(self, guess: int, low: int, high: int, budget_s: float, history: int) -> int:
        """The largest count in low..high within the budget, near `guess`; `low` itself fits."""
        if self.chunk_s(guess, history) <= budget_s:
            low = guess
            if guess == high or self.chunk_s(guess + 1, history) > budget_s:
                return guess
        else:
            high = guess - 1
            if high <= low or self.chunk_s(high, history) <= budget_s:
                return max(high, low)
        while low < high:  # a slope near 0: rounding moved the root by more than a token
            middle = (low + high + 1) // 2
            if self.chunk_s(middle, history) <= budget_s:
                low = middle
            else:
                high = middle - 1
        return low

    def scaled(self, factor: float) -> Latency:
        """Returns the model with times multiplied by `factor`.

        Raises ConfigError for a negative factor.
        """
        return Latency(
            a=self.a * factor,
            b=self.b * factor,
            c=self.c * factor,
            d=self.d * factor,
            points=tuple((tokens, seconds * factor) for tokens, seconds in self.points),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpLatency:
    """Eq. (1) for every SP degree that the instances can form; degree 1 is always there.

    Raises ConfigError when degree 1 is missing or a degree is below 1, and, from every method that
    takes `sp`, when that degree is not held.
    """

    by_sp: Mapping[int, Latency] = field(default_factory=lambda: MappingProxyType({1: Latency()}))
    degrees: tuple[int, ...] = field(init=False, repr=False, compare=False)  # ascending

    def __post_init__(self) -> None:
        degrees = tuple(sorted(self.by_sp))
        if not degrees or degrees[0] != 1:
            raise ConfigError(f"by_sp has the degrees {degrees}; they must start with 1")
        object.__setattr__(self, "degrees", degrees)

    def chunk_s(self, tokens: int, history: int = 0, sp: int = 1) -> float:
        """Returns the predicted seconds of a chunk on a group of `sp` instances."""
        try:
            latency = self.by_sp[sp]
        except KeyError:
            raise self._unknown(sp) from None
        return latency.chunk_s(tokens, history)

    def tokens_within(self, budget_s: float, history: int = 0, sp: int = 1) -> int:
        """Returns the longest chunk that `sp` instances compute within `budget_s` (Alg. 3, line
        13).
        """
        if sp not in self.by_sp:
            raise self._unknown(sp)
        return self.by_sp[sp].tokens_within(budget_s, history)

    def isolated_s(self, tokens: int) -> float:
        """Returns the seconds of prefill alone on an idle cluster: the least over the degrees."""
        return min(latency.chunk_s(tokens) for latency in self.by_sp.values())

    def scaled(self, factor: float) -> SpLatency:
        """Returns the same models with times multiplied by `factor`."""
        return SpLatency(
            by_sp=MappingProxyType({sp: self.by_sp[sp].scaled(factor) for sp in self.degrees})
        )

    def limited(self, most: int) -> SpLatency:
        """Returns the degrees up to `most`: those that a cluster of `most` instances can form."""
        return SpLatency(
            by_sp=MappingProxyType({sp: self.by_sp[sp] for sp in self.degrees if sp <= most})
        )

    def _unknown(self, sp: int) -> ConfigError:
        return ConfigError(f"sp is {sp}; the latency model holds the degrees {self.degrees}")


def _check_points(points: tuple[tuple[int, float], ...]) -> None:
    before = (0, 0.0)
    for tokens, seconds in points:
        if tokens <= before[0] or not before[1] <= seconds < math.inf:
            raise ConfigError(
                f"latency.points has ({tokens}, {seconds}) after {before}; "
                "tokens must ascend and seconds must not fall"
            )
        before = (tokens, seconds)


def _segments(
    a: float, b: float, d: float, points: tuple[tuple[int, float], ...]
) -> tuple[Segment, ...]:
    if not points:
        return ((0, a, b, d),)
    (first, first_s), (last, last_s) = points[0], points[-1]
    moved = first_s - first * (b + d * first)
    below: Segment = (0, moved, b, d)
    if moved + b + d < 0.0:
        below = _between((0, 0.0), points[0], d)
    inner = [_between(left, right, d) for left, right in itertools.pairwise(points)]
    above: Segment = (last, last_s - last * (b + d * last), b, d)
    return (below, *inner, above)


def _between(left: tuple[int, float], right: tuple[int, float], d: float) -> Segment:
    """The quadratic through both ends, with the largest curvature up to `d` that never falls."""
    (x0, y0), (x1, y1) = left, right
    slope = (y1 - y0) / (x1 - x0)
    bend = min(d, slope / (x1 - x0))
    b = slope - bend * (x0 + x1)
    return (x0, y0 - x0 * (b + bend * x0), b, bend)  # in the order of `chunk_s`: exact at x0


def _root(a: float, b: float, d: float) -> float:
    """The larger root of a + b x + d x^2; infinity where the curve never crosses 0 upwards."""
    if d <= 0.0:
        return -a / b if b > 0.0 else math.inf
    under = max(b * b - 4.0 * d * a, 0.0)
    # Of the two equal forms, the form that adds numbers of one sign keeps its digits.
    if b >= 0.0:
        slope = b + math.sqrt(under)
        if a >= 0.0:
            return 0.0
        return -2.0 * a / slope if slope > 0.0 else math.inf  # too flat for a double
    return (math.sqrt(under) - b) / (2.0 * d)
