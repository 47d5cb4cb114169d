"""Defines the metrics of a prefill instance."""

from __future__ import annotations

from millrace.engine.execution_pool import ExecutionPool
from millrace.instance.device_counts import device_passes
from millrace.telemetry.metrics import Registry
from millrace.transfer.push.control import Sending
from millrace.transfer.ring.chunk_link import Waits
from millrace.transfer.ring.manager import GroupLink


class PrefillMetrics:
    """The metrics of a prefill instance. Safe to use from the compute thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.compute_s = registry.histogram(
            "millrace_prefill_compute_seconds", "time of one forward pass over prompt tokens"
        )
        self.device_passes = device_passes(registry)
        self.chunks = registry.counter(
            "millrace_prefill_computed_chunks_total", "the scheduler's chunks computed to their end"
        )
        self.tokens = registry.counter(
            "millrace_prefill_computed_tokens_total", "prompt tokens computed"
        )
        self.cached_tokens = registry.counter(
            "millrace_prefill_cached_tokens_total", "prompt tokens whose KV was cached"
        )
        self.answered = registry.counter(
            "millrace_prefill_answered_requests_total",
            "prefill-only requests whose result was sent; kind: last and mean are pooled "
            "hidden states",
            ["kind"],
        )
        self.wait_s = registry.histogram(
            "millrace_prefill_wait_seconds", "time from the command to the start of its compute"
        )
        self.blocking_s = registry.histogram(
            "millrace_prefill_preemption_blocking_seconds",
            "time from the signal to a running prefill until it has stopped",
        )
        self.preempted = registry.counter(
            "millrace_prefill_preempted_tasks_total",
            "passes suspended for another prefill",
        )
        self.suspended_s = registry.histogram(
            "millrace_prefill_suspended_seconds",
            "time from suspension to continuation",
        )
        self.later_stages_s = registry.histogram(
            "millrace_prefill_later_stages_seconds",
            "time from the first stage's end of a prompt's last rows to its first token",
        )
        self.failed = registry.counter(
            "millrace_prefill_failed_requests_total",
            "requests that this instance could not prefill or hand over",
            ["reason"],
        )
        self.cancelled = registry.counter(
            "millrace_prefill_cancelled_requests_total", "requests cancelled by a command"
        )
        self._gangs = registry.counter(
            "millrace_prefill_group_chunks_total", "chunks computed with other instances"
        )
        self._ring_wait_s = registry.counter(
            "millrace_prefill_ring_wait_seconds_total",
            "compute time spent waiting for blocks of the ring",
        )
        self._history_wait_s = registry.counter(
            "millrace_prefill_history_wait_seconds_total",
            "compute time spent waiting for history from other instances",
        )
        self._ring_bytes = registry.counter(
            "millrace_prefill_ring_bytes_total", "KV written to other prefill instances"
        )
        self._handshake_s = registry.histogram(
            "millrace_prefill_handshake_seconds",
            "time from asking a decode instance to its grant",
        )
        self._transfer_s = registry.histogram(
            "millrace_prefill_transfer_seconds", "time from a request's first KV write to its last"
        )
        self._sent = registry.counter(
            "millrace_prefill_sent_bytes_total", "KV written to decode instances"
        )

    def watch(self, pool: ExecutionPool) -> None:
        """Adds the gauge of tasks that have begun and wait in the pool."""
        self._registry.gauge_function(
            "millrace_prefill_suspended_tasks",
            "suspended prefills",
            lambda: float(pool.suspended),
        )

    def waited(self, waits: Waits) -> None:
        """Counts a chunk that was computed in a group."""
        self._gangs.inc()
        self._ring_wait_s.inc(waits.blocks_s)
        self._history_wait_s.inc(waits.history_s)

    def exchanged(self, link: GroupLink) -> None:
        """Counts the bytes of a closed link."""
        self._ring_bytes.inc(link.bytes_sent)

    def sent(self, session: Sending) -> None:
        """Counts a closed session, whether it succeeded or failed."""
        timings = session.timings
        if timings.granted_s:
            self._handshake_s.observe(timings.handshake_s)
        if timings.bytes:
            self._transfer_s.observe(timings.last_write_s - timings.first_write_s)
            self._sent.inc(timings.bytes)
