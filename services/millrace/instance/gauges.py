"""Defines the gauges of every instance, in any role."""

from __future__ import annotations

from typing import Protocol

from millrace.engine.assembly import KvMemory
from millrace.telemetry.metrics import Registry
from millrace_kernels import dispatch


class Counted(Protocol):
    """The part of a role that the gauges read."""

    name: str

    def counts(self) -> tuple[int, int]:
        """Counts the requests in compute or in the batch, and the waiting requests."""


def add_gauges(registry: Registry, role: Counted, memory: KvMemory) -> None:
    registry.gauge_function(
        "millrace_kv_free_pages", "KV pages that no request uses", lambda: memory.pool.free_pages
    )
    registry.gauge_function(
        "millrace_kv_used_pages", "KV pages that requests use", lambda: memory.pool.used_pages
    )
    registry.counter_function(
        "millrace_attention_fallback_changes_total",
        "attention plans that another backend computed because FlashInfer failed on their shape",
        dispatch.fallbacks,
    )
    for index, state in enumerate(("running", "waiting")):
        registry.gauge_function(
            f"millrace_{role.name}_{state}_requests",
            f"requests {state} at this instance",
            lambda index=index: role.counts()[index],  # type: ignore[misc]
        )
    registry.gauge_function(
        "millrace_kv_used_ratio",
        "KV pages that requests use, over all KV pages",
        lambda: memory.pool.used_pages / memory.pool.num_pages,
    )
