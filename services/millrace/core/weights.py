"""The weights of classes and of tenants, by which the policy `millrace` shares a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The class of a request that names none, and the tenant of a request without a known key.
DEFAULT_CLASS = "default"
DEFAULT_TENANT = "default"
#: The class of requests that can wait for hours. It exists without being configured.
BATCH_CLASS = "batch"

#: The range of a weight.
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights by name. A name that is missing has the weight 1."""

    classes: Mapping[str, float] = field(default_factory=dict)
    tenants: Mapping[str, float] = field(default_factory=dict)

    def with_changes(self, other: Weights) -> Weights:
        """Returns these weights, with those of `other` in the place of these."""
        return Weights(
            classes={**self.classes, **other.classes},
            tenants={**self.tenants, **other.tenants},
        )


def is_weight(value: float) -> bool:
    """Returns whether the value is in the range of weights."""
    return LEAST_WEIGHT <= value <= MOST_WEIGHT


def weight_range() -> str:
    """Returns the range in words, for messages."""
    return f"between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}"
