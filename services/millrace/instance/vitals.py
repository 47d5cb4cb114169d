"""Serves an instance's metrics and readiness from its start on, also while weights are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from millrace.core.config import TelemetryConfig
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import serve_metrics


@dataclass(slots=True)
class Vitals:
    """The metrics of an instance and its readiness; the host sets `ready`."""

    registry: Registry = field(default_factory=Registry)
    ready: Callable[[], bool] = lambda: False


@contextlib.asynccontextmanager
async def open_vitals(config: TelemetryConfig, host: str) -> AsyncIterator[Vitals]:
    """Serves /metrics, /health and /ready on `host` if `config` names a port.

    Raises MillraceError when it can't listen.
    """
    vitals = Vitals()
    async with contextlib.AsyncExitStack() as stack:
        if config.metrics_port:
            server = await serve_metrics(
                config.metrics_port, lambda: vitals.ready(), registry=vitals.registry, host=host
            )
            stack.push_async_callback(server.close)
        yield vitals
