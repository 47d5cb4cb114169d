"""Defines the metrics of a mixed instance, beside those of a decode instance."""

from __future__ import annotations

from millrace.colocated.packing import Plan
from millrace.instance.device_counts import device_passes
from millrace.telemetry.metrics import Registry

TOKEN_BUCKETS = tuple(float(1 << i) for i in range(4, 15))
RATIO_BUCKETS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
SHARE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


class MixedMetrics:
    """The metrics of mixed iterations. Used from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self.device_passes = device_passes(registry)
        self._iteration_s = registry.histogram(
            "millrace_mixed_iteration_seconds", "one forward pass with prefill chunks, and sampling"
        )
        self._predicted_s = registry.histogram(
            "millrace_mixed_predicted_seconds", "predicted time of an iteration when it was packed"
        )
        self._ratio = registry.histogram(
            "millrace_mixed_measured_to_predicted_ratio",
            "measured over predicted time of iterations with prefill chunks",
            buckets=RATIO_BUCKETS,
        )
        self._chunk_tokens = registry.histogram(
            "millrace_mixed_chunk_tokens", "prompt tokens of an iteration", buckets=TOKEN_BUCKETS
        )
        self._chunks = registry.counter(
            "millrace_mixed_prompt_chunks_total", "chunks of prompts in iterations"
        )
        self._yielded = registry.histogram(
            "millrace_mixed_yield_ratio",
            "share of t_target that a long prefill yielded to shorter prefills",
            buckets=SHARE_BUCKETS,
        )

    def iterated(self, plan: Plan, seconds: float) -> None:
        """Counts an iteration that has ended."""
        if not plan.shares:
            return
        self._iteration_s.observe(seconds)
        self._predicted_s.observe(plan.predicted_s)
        self._ratio.observe(seconds / plan.predicted_s)
        self._chunk_tokens.observe(sum(share.tokens for share in plan.shares))
        self._chunks.inc(len(plan.shares))
        if plan.yielded:
            self._yielded.observe(plan.yielded)
