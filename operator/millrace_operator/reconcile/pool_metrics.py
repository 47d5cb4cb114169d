"""The measured signals of a pool, in the form of its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.core.autoscale.rules import PoolMetrics
from millrace_operator.schema.pools import PoolSpec
from millrace_operator.spec import SIGNALS, signals

#: The least value of a signal that is shown: it would decay for hours in the status of an idle
#: pool.
LEAST = 0.005


def seen(spec: PoolSpec, metrics: PoolMetrics) -> list[dict[str, Any]]:
    """Returns signals with their targets, in the spec's order."""
    followed = signals(spec)
    if not followed:
        return _contexts(metrics)
    measured = _measured(metrics)
    return [
        {"name": name, "value": _rounded(measured[name]), "target": target}
        for name, target in followed.items()
        if name in measured
    ]


def _measured(metrics: PoolMetrics) -> Mapping[str, float]:
    """Returns the measured values by name, per instance; unmeasured signals are left out."""
    capacity = max(metrics.capacity, 1)
    found = {}
    for name, signal in SIGNALS.items():
        value: float | None = getattr(metrics, signal.measured)
        if value is not None:
            found[name] = value / capacity if name in ("backlogSeconds", "utilization") else value
    return found


def _contexts(metrics: PoolMetrics) -> list[dict[str, Any]]:
    longest = max((context.tokens for context in metrics.contexts), default=0)
    return [
        {"name": "contexts", "value": str(len(metrics.contexts))},
        {"name": "longestContextTokens", "value": _rounded(longest)},
    ]


def _rounded(value: float) -> str:
    """Rounds to two digits: less is noise. A decayed value is written as 0."""
    return "0" if value < LEAST else f"{float(f'{value:.2g}'):.15g}"
