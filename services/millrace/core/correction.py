"""Online correction of predicted times, one factor for each instance.

FlowPrefill section 6.4 fits its predictor offline and shows online errors to be small; Tetris
section 5.1 reuses a fit until the GPU or model changes. Neither corrects a fit that is off. Here
each finished piece of work moves its instance's factor towards observed / predicted, so that a
device slower than its profile is planned for as it is.

An observation that differs from the current factor by more than `outlier` times counts for nothing
(a page fault, a paused process), unless `persistent` of them follow one another on the same side:
then the device has changed, and the factor jumps there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """How fast and how far predictions are corrected.

    weight: of one observation, 0 to 1. least, most: bounds of the factor. outlier: ratio to the
    current factor beyond which an observation is ignored. persistent: outliers in a row that are
    believed after all.
    """

    weight: float = 0.2
    least: float = 0.25
    most: float = 8.0
    outlier: float = 3.0
    persistent: int = 5

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0:
            raise ConfigError(f"weight is {self.weight}; it must be above 0 and at most 1")
        if not 0.0 < self.least <= 1.0 <= self.most < math.inf:
            raise ConfigError(
                f"least and most are {self.least} and {self.most}; they must be above 0, "
                "finite, and have 1 between them"
            )
        if not 1.0 < self.outlier < math.inf:
            raise ConfigError(f"outlier is {self.outlier}; it must be above 1 and finite")
        if self.persistent < 1:
            raise ConfigError(f"persistent is {self.persistent}; it must be 1 or more")

    def observations_to(self, error: float) -> int:
        """Steady observations until the factor is within `error` (relative) of them.

        From a factor that is off by at most `outlier` times. The logarithm of what is missing
        shrinks by 1 - weight an observation, so this many do: ceil(ln(ln(1 + error) / ln(outlier))
        / ln(1 - weight)).
        """
        if self.weight == 1.0:
            return 1
        missing = math.log1p(error) / math.log(self.outlier)
        return max(math.ceil(math.log(missing) / math.log1p(-self.weight)), 0)


@dataclass(slots=True)
class _Instance:
    factor: float = 1.0
    strange: int = 0  # outliers in a row; negative: below the factor


class Corrections:
    """The factor of every instance: observed seconds over predicted, smoothed."""

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self._config = config or CorrectionConfig()
        self._instances: dict[str, _Instance] = {}

    def factor(self, instance_id: str) -> float:
        """What to multiply a prediction for this instance with; 1 before any observation."""
        instance = self._instances.get(instance_id)
        return instance.factor if instance else 1.0

    def observe(self, instance_id: str, *, predicted_s: float, observed_s: float) -> None:
        """Takes in one finished piece of work; `predicted_s` is the profile's, uncorrected.

        Times that are not finite and above 0 are ignored: they say nothing about speed.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < observed_s < math.inf):
            return
        config = self._config
        ratio = min(max(observed_s / predicted_s, config.least), config.most)
        instance = self._instances.setdefault(instance_id, _Instance())
        off = ratio / instance.factor
        if 1.0 / config.outlier <= off <= config.outlier:
            instance.strange = 0
            # In logarithms, so that twice as slow and twice as fast weigh the same.
            instance.factor *= off**config.weight
            return
        side = 1 if off > 1.0 else -1
        instance.strange = instance.strange + side if instance.strange * side > 0 else side
        if abs(instance.strange) >= config.persistent:
            instance.factor, instance.strange = ratio, 0

    def forget(self, instance_id: str) -> None:
        """Drops an instance that left."""
        self._instances.pop(instance_id, None)
