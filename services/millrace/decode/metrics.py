"""Defines the metrics of a decode instance."""

from __future__ import annotations

from millrace.instance.device_counts import DeviceCounts
from millrace.telemetry.metrics import Registry

BATCH_BUCKETS = tuple(float(1 << i) for i in range(11))


class DecodeMetrics:
    """The metrics of a decode instance. Safe to use from the compute thread."""

    def __init__(self, registry: Registry) -> None:
        self.step_s = registry.histogram(
            "millrace_decode_step_seconds", "time of one step of the batch"
        )
        self.batch = registry.histogram(
            "millrace_decode_batch_sequences", "sequences in a step", buckets=BATCH_BUCKETS
        )
        self.device_steps = DeviceCounts(
            registry.counter(
                "millrace_decode_device_steps_total",
                "steps on a GPU; graph: by a CUDA graph, else operator by operator and why no "
                "graph fits: off, batch, context or page_table",
                ["by"],
            )
        )
        self.tokens = registry.counter(
            "millrace_decode_generated_tokens_total",
            "tokens emitted, first tokens included",
        )
        self.cached_tokens = registry.counter(
            "millrace_decode_cached_tokens_total",
            "prompt tokens whose KV was cached at this instance",
        )
        self.join_s = registry.histogram(
            "millrace_decode_join_seconds",
            "time from a request's first token until it joined the batch",
        )
        self.failed = registry.counter(
            "millrace_decode_failed_requests_total",
            "requests that this instance could not accept or finish",
            ["reason"],
        )
        self.cancelled = registry.counter(
            "millrace_decode_cancelled_requests_total", "requests cancelled by a command"
        )
        self.preempted = registry.counter(
            "millrace_decode_preempted_requests_total",
            "requests removed from the batch for lack of memory; wait: their KV stays",
            ["by"],
        )
        self.resumed = registry.counter(
            "millrace_decode_resumed_requests_total", "preempted requests back in the batch"
        )
        self.swapped_bytes = registry.counter(
            "millrace_decode_swapped_bytes_total",
            "KV copied to host memory and back",
            ["direction"],
        )
