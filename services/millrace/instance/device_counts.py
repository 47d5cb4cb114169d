"""Counts how a GPU computed steps and passes: by CUDA graphs, or why not."""

from __future__ import annotations

from collections import Counter

from prometheus_client import Counter as Labelled

from millrace.engine.forward.pass_states import StepCounts
from millrace.telemetry.metrics import Registry


class DeviceCounts:
    """A counter, labelled `by`, that follows an engine's `StepCounts`. One thread uses it."""

    def __init__(self, total: Labelled) -> None:
        self._total = total
        self._counted: Counter[str] = Counter()

    def follow(self, counts: StepCounts) -> None:
        """Adds what was computed since the last call."""
        now = Counter({"graph": counts.graph, **counts.eager})
        for by, count in (now - self._counted).items():
            self._total.labels(by).inc(count)
        self._counted = now


def device_passes(registry: Registry) -> DeviceCounts:
    """Returns the counter of passes with rows of prompts."""
    return DeviceCounts(
        registry.counter(
            "millrace_prefill_device_steps_total",
            "passes with rows of prompts on a GPU; graph: by CUDA graphs, else operator by "
            "operator and why: off, failed, rows (too many), remote (KVP) or ring",
            ["by"],
        )
    )
