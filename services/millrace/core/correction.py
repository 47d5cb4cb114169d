"""Online correction of predicted times: of each instance, and of each band of lengths.

FlowPrefill section 6.4 fits its predictor offline and shows online errors to be small; Tetris
section 5.1 reuses a fit until the GPU or model changes. Neither corrects a fit that is off. Here
log(observed / predicted) is taken to be the sum of two things that nobody sees apart: what the
instance's device and machine do to all its work, and what the profile does not know of work of that
length and SP degree (its band). Both are believed as Gaussians, and each finished piece of work
moves both by their uncertainty (a Kalman filter whose parts are kept independent): the first says
nearly all of the instance, and once that is known, what differs says of the band. So a machine that
is busy is learned from short prompts and holds for long ones too.

An observation that differs from the prediction by more than `outlier` times counts for nothing (a
page fault, a paused process), unless `persistent` of them follow one another on the same side: then
it was the instance that changed, or, where others came as predicted in between, the band.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from millrace.core.errors import ConfigError

#: The SP degree, and the octave of the token that the work ends with.
Band = tuple[int, int]
#: What is known of an octave says so much of the next one, of which nothing is.
NEXT_OCTAVE = 0.5
#: Requests that `OnTop` remembers, and of how many of them it takes the median.
LAST, NEAREST = 64, 9


def band_of(end_token: int, sp: int = 1) -> Band:
    """Of work that ends with `end_token` (history and own tokens) on a group of `sp`."""
    return sp, end_token.bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """How fast and how far predictions are corrected.

    noise, instance, band: standard deviations of the logarithm: of one observation, of an instance
    and of a band of which nothing is known. overhead_s: what a live pass may cost that a measured
    one did not, whatever its length: bands of work that is as short are less certain by it, and say
    little of the instance. jitter_s: what one pass may take more than another for no reason. drift:
    how far an instance moves, a band moves a third of it, from one observation to the next. least,
    most: bounds of observed over predicted.
    outlier: ratio to the prediction beyond which an observation is ignored. persistent: outliers in
    a row that are believed after all.
    """

    noise: float = 0.15
    instance: float = 0.5
    band: float = 0.2
    overhead_s: float = 5e-3
    jitter_s: float = 1e-3
    drift: float = 0.05
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
    """About a logarithm; strange: outliers in a row, negative below what was predicted."""

    variance: float
    mean: float = 0.0
    strange: int = 0

    def has_strange(self, side: int) -> int:
        self.strange = self.strange + side if self.strange * side > 0 else side
        return abs(self.strange)

    def jump(self, mean: float) -> None:
        self.mean, self.strange = mean, 0


@dataclass(slots=True)
class _Instance(_Belief):
    bands: dict[Band, _Belief] = field(default_factory=dict)

    def of_band(self, band: Band) -> float:
        """What is believed of it, or, where nothing is, what its nearest octave suggests."""
        if band in self.bands:
            return self.bands[band].mean
        sp, octave = band
        known = [(abs(o - octave), -o) for s, o in self.bands if s == sp]
        if not known:
            return 0.0
        far, nearest = min(known)
        return NEXT_OCTAVE**far * self.bands[sp, -nearest].mean


class Corrections:
    """The factor of every instance and band: observed seconds over predicted, smoothed."""

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self._config = config or CorrectionConfig()
        self._instances: dict[str, _Instance] = {}

    def factor(self, instance_id: str, band: Band) -> float:
        """What to multiply a prediction for this instance with; 1 before any observation."""
        instance = self._instances.get(instance_id)
        return math.exp(instance.mean + instance.of_band(band)) if instance else 1.0

    def observe(
        self, instance_id: str, band: Band, *, predicted_s: float, observed_s: float
    ) -> None:
        """Takes in one finished piece of work; `predicted_s` is the profile's, uncorrected.

        Times that are not finite and above 0 are ignored: they say nothing about speed.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < observed_s < math.inf):
            return
        config = self._config
        ratio = math.log(min(max(observed_s / predicted_s, config.least), config.most))
        instance = self._instances.setdefault(instance_id, _Instance(config.instance**2))
        off = ratio - instance.mean - instance.of_band(band)
        if band not in instance.bands:
            unknown = config.band**2 + (config.overhead_s / predicted_s) ** 2
            instance.bands[band] = _Belief(unknown, instance.of_band(band))
        of_band = instance.bands[band]
        if abs(off) > math.log(config.outlier):
            side = 1 if off > 0.0 else -1
            strange = instance.has_strange(side), of_band.has_strange(side)
            if strange[0] >= config.persistent:
                instance.jump(ratio - of_band.mean)
                of_band.strange = 0
            elif strange[1] >= config.persistent:
                of_band.jump(ratio - instance.mean)
            return
        instance.strange = of_band.strange = 0
        noise = config.noise**2 + (config.jitter_s / observed_s) ** 2
        total = instance.variance + of_band.variance + noise
        for belief, drift in ((instance, config.drift), (of_band, config.drift / 3.0)):
            gain = belief.variance / total
            belief.mean += gain * off
            belief.variance = (1.0 - gain) * belief.variance + drift**2

    def forget(self, instance_id: str) -> None:
        """Drops an instance that left."""
        self._instances.pop(instance_id, None)


class OnTop:
    """What a first token takes beyond waiting and computing: messages, a hand-over, a decode step.

    It grows with the prompt, whose last K/V travels in it. So a prompt's is the median of those
    requests among the last ones whose prompts were nearest to it in length, by octaves: no single
    request throws it.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=LAST)  # octave, seconds; newest first
        self._known: dict[int, float] = {}  # octave -> seconds, until the next request

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """Takes in one request that waited for nobody."""
        self._last.appendleft((prompt_tokens.bit_length(), max(seconds, 0.0)))
        self._known.clear()

    def seconds(self, prompt_tokens: int) -> float:
        """Of a prompt of that length; 0 before any observation."""
        octave = prompt_tokens.bit_length()
        if octave not in self._known:
            nearest = sorted(self._last, key=lambda seen: abs(seen[0] - octave))[:NEAREST]
            self._known[octave] = median_low(s for _, s in nearest) if nearest else 0.0
        return self._known[octave]
