"""Metrics that follow counts of an engine."""

from __future__ import annotations

from collections import Counter

from millrace.engine.forward.pass_states import StepCounts
from millrace.instance.device_counts import device_passes
from millrace.telemetry.metrics import Registry


def test_passes_are_counted_once_by_their_way():
    registry = Registry()
    counts = device_passes(registry)

    def value(by: str) -> float | None:
        return registry.collectors.get_sample_value(
            "millrace_prefill_device_steps_total", {"by": by}
        )

    passes = StepCounts(graph=3, eager=Counter({"rows": 1}))
    counts.follow(passes)
    counts.follow(passes)
    assert (value("graph"), value("rows"), value("remote")) == (3, 1, None)
    passes.graph += 2
    passes.eager["remote"] += 1
    counts.follow(passes)
    assert (value("graph"), value("rows"), value("remote")) == (5, 1, 1)
