"""What a process sends to a collector besides its spans: log records and metrics, if wanted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from millrace.core.config import TelemetryConfig
from millrace.telemetry.metrics import Registry
from millrace.telemetry.otlp.collector import resource
from millrace.telemetry.otlp.logs import OtlpLogs
from millrace.telemetry.otlp.metrics import OtlpMetrics


class Exports:
    """Exports what `config` names, from `start` to `close`."""

    def __init__(
        self, config: TelemetryConfig, service: str, instance_id: str, registry: Registry
    ) -> None:
        self._config = config
        self._resource = resource(service, instance_id)
        self._registry = registry
        self._logs: OtlpLogs | None = None
        self._metrics: OtlpMetrics | None = None

    def start_in(self, stack: AsyncExitStack) -> None:
        """Begins, and closes with `stack`."""
        self.start()
        stack.push_async_callback(self.close)

    def start(self) -> None:
        """Begins; call it on the event loop on which the metrics change."""
        endpoint, interval_s = self._config.otlp_endpoint, self._config.otlp_metrics_s
        if self._config.otlp_logs == "on":
            self._logs = OtlpLogs.start(endpoint, self._resource)
        if interval_s:
            self._metrics = OtlpMetrics(endpoint, self._resource, self._registry, interval_s)

    async def close(self) -> None:
        """Exports what is left; waits a few seconds at most."""
        if self._metrics is not None:
            await self._metrics.close()
        if self._logs is not None:
            await asyncio.to_thread(self._logs.close)
