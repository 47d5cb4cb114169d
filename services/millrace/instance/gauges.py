"""What every instance shows of itself, whatever its role."""

from __future__ import annotations

from typing import Protocol

from millrace.engine.assembly import KvMemory
from millrace.telemetry.metrics import Registry


class Counted(Protocol):
    """A role, as far as it is counted."""

    name: str

    def counts(self) -> tuple[int, int]:
        """Requests in compute or in the batch, and those that wait."""


def add_gauges(registry: Registry, role: Counted, memory: KvMemory) -> None:
    registry.gauge_function(
        "millrace_kv_free_pages", "KV pages that no request uses", lambda: memory.pool.free_pages
    )
    registry.gauge_function(
        "millrace_kv_used_pages", "KV pages that requests use", lambda: memory.pool.used_pages
    )
    for index, state in enumerate(("running", "waiting")):
        registry.gauge_function(
            f"millrace_{role.name}_{state}_requests",
            f"requests {state} at this instance",
            lambda index=index: role.counts()[index],  # type: ignore[misc]
        )
