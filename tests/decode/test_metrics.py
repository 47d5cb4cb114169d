"""Metrics of a decode instance that follow counts of its engine."""

from __future__ import annotations

from collections import Counter

from millrace.decode.metrics import DecodeMetrics
from millrace.engine.forward.pass_states import StepCounts
from millrace.telemetry.metrics import Registry


def test_steps_are_counted_once_by_their_way():
    registry = Registry()
    metrics = DecodeMetrics(registry)

    def value(by: str) -> float | None:
        return registry.collectors.get_sample_value(
            "millrace_decode_device_steps_total", {"by": by}
        )

    steps = StepCounts(graph=3, eager=Counter({"batch": 1}))
    metrics.count_steps(steps)
    metrics.count_steps(steps)
    assert (value("graph"), value("batch"), value("context")) == (3, 1, None)
    steps.graph += 2
    steps.eager["context"] += 1
    metrics.count_steps(steps)
    assert (value("graph"), value("batch"), value("context")) == (5, 1, 1)
