"""Corrects predicted times online, per instance and per band of lengths.

FlowPrefill section 6.4 fits its predictor offline and shows online errors to be small; Tetris
section 5.1 reuses a fit until the GPU or model changes. Neither corrects a wrong fit. Here the
observed time of a piece of work is taken to be

    predicted * exp(instance + band) + overhead:

`instance`: the error of the device and machine, common to all work of the instance. `band`: the
error of the profile for work of that length and SP degree. `overhead`: seconds that each piece
costs live and did not cost when the profile was measured. No term is observed alone. All three are
Gaussian beliefs, and each finished piece of work moves them by their uncertainty (an extended
Kalman filter of the logarithm; bands are taken to be independent). Short pieces determine the
overhead, long pieces nearly all of the instance's factor; differences between bands go to the
bands. So the factor of a busy machine is learned from short prompts and holds for long prompts too.

An observation is ignored (a page fault, a paused process) if it differs from the prediction by more
than `outlier` times, and by more than the uncertainty. If `persistent` such observations follow one
another on the same side, they are believed: the instance changed, or, if other bands came as
predicted in between, the band changed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from operator import mul
from statistics import median_low

from millrace.core.errors import ConfigError

#: The SP degree, and the octave of the token that the work ends with.
Band = tuple[int, int]
#: How much a known octave determines the next octave, of which nothing is known.
NEXT_OCTAVE = 0.5
#: Gauss-Newton steps towards the likeliest beliefs.
STEPS = 4
#: Requests that `OnTop` remembers, and of how many of them it takes the median.
LAST, NEAREST = 64, 9


def band_of(end_token: int, sp: int = 1) -> Band:
    """The band of work that ends with `end_token` (history and own tokens) on a group of `sp`."""
    return sp, end_token.bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """How fast and how far predictions are corrected.

    noise, instance, band: standard deviations of the logarithm: of one observation, of an instance
    and of a band of which nothing is known. overhead_s: standard deviation of the seconds that a
    piece of work costs at any length. jitter_s: standard deviation of the seconds by which one
    piece differs from another at random. drift: how far an instance moves from one observation to
    the next; a band moves a third of it. least, most: bounds of an instance's and a band's factor.

    outlier: ratio to the prediction beyond which an observation is ignored. persistent: outliers in
    a row that are believed after all.
    """

    noise: float = 0.15
    instance: float = 0.4
    band: float = 0.2
    overhead_s: float = 5e-3
    jitter_s: float = 1.5e-3
    drift: float = 0.03
    least: float = 0.25
    most: float = 8.0
    outlier: float = 3.0
    persistent: int = 5

    def __post_init__(self) -> None:
        for name in ("noise", "instance", "band", "overhead_s", "jitter_s", "drift"):
            if not 0.0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value}; it must be above 0 and finite")
        if not 0.0 < self.least <= 1.0 <= self.most < math.inf:
            raise ConfigError(
                f"least and most are {self.least} and {self.most}; they must be above 0, "
                "finite, and have 1 between them"
            )
        if not 1.0 < self.outlier < math.inf:
            raise ConfigError(f"outlier is {self.outlier}; it must be above 1 and finite")
        if self.persistent < 1:
            raise ConfigError(f"persistent is {self.persistent}; it must be 1 or more")


@dataclass(slots=True)
class _Belief:
    """A mean and its variance.

    strange: outliers in a row, negative if they are below the prediction.
    """

    variance: float
    mean: float = 0.0
    strange: int = 0

    def has_strange(self, side: int) -> int:
        self.strange = self.strange + side if self.strange * side > 0 else side
        return abs(self.strange)


@dataclass(slots=True)
class _Instance(_Belief):
    """The belief about the logarithm of an instance's factor.

    `overhead` is in seconds, `together` the covariance of both: a short piece of work is evidence
    of both at once.
    """

    overhead: _Belief = field(default_factory=lambda: _Belief(0.0))
    together: float = 0.0
    bands: dict[Band, _Belief] = field(default_factory=dict)

    def of_band(self, band: Band) -> float:
        """Returns the belief about the band, or, if nothing is known, about its nearest octave."""
        if band in self.bands:
            return self.bands[band].mean
        sp, octave = band
        known = [(abs(o - octave), -o) for s, o in self.bands if s == sp]
        if not known:
            return 0.0
        far, nearest = min(known)
        return NEXT_OCTAVE**far * self.bands[sp, -nearest].mean

    def seconds(self, band: Band, predicted_s: float) -> float:
        return predicted_s * math.exp(self.mean + self.of_band(band)) + self.overhead.mean


class Corrections:
    """The beliefs about each instance: its factor, its bands' factors, its overhead."""

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self._config = config or CorrectionConfig()
        self._instances: dict[str, _Instance] = {}

    def seconds(self, instance_id: str, band: Band, predicted_s: float) -> float:
        """Returns the corrected seconds of work of this band, for which the profile predicts
        `predicted_s`.
        """
        instance = self._instances.get(instance_id)
        if instance is None or predicted_s <= 0.0:
            return predicted_s
        return instance.seconds(band, predicted_s)

    def observe(
        self, instance_id: str, band: Band, *, predicted_s: float, observed_s: float
    ) -> None:
        """Takes in one finished piece of work; `predicted_s` is the profile's, uncorrected.

        Times that are not finite and above 0 are ignored: they tell nothing about speed.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < observed_s < math.inf):
            return
        config = self._config
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = _Instance(config.instance**2, overhead=_Belief(config.overhead_s**2))
            self._instances[instance_id] = instance
        of_band = instance.bands.get(band)
        if of_band is None:
            of_band = instance.bands[band] = _Belief(config.band**2, instance.of_band(band))
        expected_s = instance.seconds(band, predicted_s)
        # Jitter is relative to both: relative to `observed_s` alone, late pieces would count more
        # than early pieces, and predictions would be too long.
        noise = config.noise**2 + config.jitter_s**2 / (observed_s * expected_s)
        off = math.log(observed_s / expected_s)
        seen = _Seen(instance, of_band, predicted_s, noise)
        if abs(off) <= math.log(config.outlier) + math.sqrt(seen.total):
            instance.strange = of_band.strange = 0
        elif (changed := self._changed(instance, of_band, off)) is not None:
            changed.strange, changed.variance = 0, math.log(config.outlier) ** 2
            seen = _Seen(instance, of_band, predicted_s, noise)
        else:
            return
        seen.update(observed_s)
        for factor in (instance, of_band):
            factor.mean = min(max(factor.mean, math.log(config.least)), math.log(config.most))
        instance.variance += config.drift**2
        of_band.variance += (config.drift / 3.0) ** 2
        instance.overhead.variance += (config.drift * config.overhead_s) ** 2

    def _changed(self, instance: _Instance, of_band: _Belief, off: float) -> _Belief | None:
        """The belief that changed, if outliers persist: nothing is known of its new value."""
        side = 1 if off > 0.0 else -1
        strange = instance.has_strange(side), of_band.has_strange(side)
        if strange[0] >= self._config.persistent:
            of_band.strange = 0
            return instance
        return of_band if strange[1] >= self._config.persistent else None

    def forget(self, instance_id: str) -> None:
        """Drops an instance that left."""
        self._instances.pop(instance_id, None)


class _Seen:
    """The pull of one observation at the beliefs, linearised about their means."""

    def __init__(
        self, instance: _Instance, of_band: _Belief, predicted_s: float, noise: float
    ) -> None:
        self._instance = instance
        self._band = of_band
        self._predicted_s = predicted_s
        self._noise = noise
        self._at(instance.mean, of_band.mean, instance.overhead.mean)

    def _at(self, instance: float, of_band: float, overhead_s: float) -> None:
        """Computes `slopes`: how the logarithm of the expected time moves with instance, band,
        overhead.
        """
        overhead_s = max(overhead_s, 0.0)
        self.expected_s = self._predicted_s * math.exp(instance + of_band) + overhead_s
        by_factors, by_overhead = 1.0 - overhead_s / self.expected_s, 1.0 / self.expected_s
        self.slopes = by_factors, by_factors, by_overhead
        whole = self._instance
        self.pulls = (
            whole.variance * by_factors + whole.together * by_overhead,
            self._band.variance * by_factors,
            whole.together * by_factors + whole.overhead.variance * by_overhead,
        )
        self.total = self._noise + sum(map(mul, self.slopes, self.pulls))

    def update(self, observed_s: float) -> None:
        """Sets the beliefs to the likeliest values after `observed_s`, by Gauss-Newton steps.

        Far from the mean, one linear step would give the overhead half of the whole error.
        """
        instance, of_band, overhead = self._instance, self._band, self._instance.overhead
        before = means = instance.mean, of_band.mean, overhead.mean
        for _ in range(STEPS):
            moved = sum(
                s * (mean - old) for s, mean, old in zip(self.slopes, means, before, strict=True)
            )
            off = math.log(observed_s / self.expected_s) + moved
            means = tuple(
                old + p / self.total * off for old, p in zip(before, self.pulls, strict=True)
            )
            self._at(*means)
        instance.mean, of_band.mean, overhead.mean = means[0], means[1], max(means[2], 0.0)
        by_instance, by_band, by_overhead = self.pulls
        instance.variance -= by_instance**2 / self.total
        of_band.variance -= by_band**2 / self.total
        overhead.variance -= by_overhead**2 / self.total
        instance.together -= by_instance * by_overhead / self.total


class OnTop:
    """Predicts the seconds of a first token beyond waiting and computing: messages, KV, a decode
    step.

    They grow with the prompt, whose last K/V is transferred in them. A prompt's value is the median
    of the recent requests whose prompts were nearest to it in length, by octaves, so that no single
    request determines it.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=LAST)  # octave, seconds; newest first
        self._known: dict[int, float] = {}  # octave -> seconds, until the next request

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """Takes in one request that waited for no other request."""
        self._last.appendleft((prompt_tokens.bit_length(), max(seconds, 0.0)))
        self._known.clear()

    def seconds(self, prompt_tokens: int) -> float:
        """Returns the seconds for a prompt of that length; 0 before any observation."""
        octave = prompt_tokens.bit_length()
        if octave not in self._known:
            nearest = sorted(self._last, key=lambda seen: abs(seen[0] - octave))[:NEAREST]
            self._known[octave] = median_low(s for _, s in nearest) if nearest else 0.0
        return self._known[octave]
