"""What was measured of a pool, as its status shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.core.autoscale.rules import PoolMetrics
from millrace_operator.observed import Object
from millrace_operator.spec import SIGNALS, signals

#: Of a signal, which would fade for hours in the status of an idle pool.
LEAST = 0.005


def seen(pool: Object, metrics: PoolMetrics) -> list[dict[str, Any]]:
    """Signals with their targets, in the spec's order."""
    followed = signals(pool)
    if not followed:
        return _contexts(metrics)
    measured = _measured(metrics)
    return [
        {
            "name": signal["name"],
            "value": _rounded(measured[signal["name"]]),
            "target": signal["target"],
        }
        for signal in followed
        if signal["name"] in measured
    ]


def _measured(metrics: PoolMetrics) -> Mapping[str, float]:
    """By name, an instance; what nobody measured is left out."""
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
    """Two digits: less is noise. What fades away is written down as nothing in the end."""
    return "0" if value < LEAST else f"{float(f'{value:.2g}'):.15g}"
