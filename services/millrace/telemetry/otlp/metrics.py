"""Sends a process's metrics to a collector, as they are on /metrics.

Names, labels and buckets are those of /metrics; values count from the start of the process. An
export that fails is lost: the next one has the same counts and more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from millrace.telemetry.metrics import Registry
from millrace.telemetry.otlp.collector import SCOPE, connection

_TOTAL: Final = AggregationTemporality.CUMULATIVE


class OtlpMetrics:
    """Exports the metrics of a registry again and again, until `close`."""

    def __init__(
        self, endpoint: str, resource: Resource, registry: Registry, interval_s: float
    ) -> None:
        self._exporter = OTLPMetricExporter(**connection(endpoint))
        self._resource = resource
        self._registry = registry
        self._began_ns = time.time_ns()
        self._task = asyncio.create_task(self._run(interval_s))

    async def _run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self._export()

    async def _export(self) -> None:
        # Collected on the event loop, between changes of the state that gauges read.
        families = list(self._registry.collectors.collect())
        await asyncio.to_thread(self._send, families, time.time_ns())

    def _send(self, families: Sequence[Family], now_ns: int) -> None:
        self._exporter.export(metrics_data(families, self._resource, self._began_ns, now_ns))

    async def close(self) -> None:
        """Exports the last values; waits a few seconds at most."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._export()
        await asyncio.to_thread(self._exporter.shutdown)


def metrics_data(
    families: Iterable[Family], resource: Resource, began_ns: int, now_ns: int
) -> MetricsData:
    """Returns families of Prometheus as OTLP has them. Times are Unix times in ns."""
    metrics = [
        metric for family in families if (metric := _metric(family, began_ns, now_ns)) is not None
    ]
    scope = ScopeMetrics(InstrumentationScope(SCOPE), metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(family: Family, began_ns: int, now_ns: int) -> Metric | None:
    data: Sum | Gauge | Histogram
    name = family.name
    if family.type == "histogram":
        points = [_histogram(s, began_ns, now_ns) for s in _by_labels(family.samples)]
        data = Histogram(points, _TOTAL)
    else:
        is_counter = family.type == "counter"
        name = f"{name}_total" if is_counter else name
        values = [
            NumberDataPoint(dict(one.labels), began_ns, now_ns, one.value)
            for one in family.samples
            if one.name == name
        ]
        data = Sum(values, _TOTAL, is_monotonic=True) if is_counter else Gauge(values)
    if not data.data_points:
        return None
    return Metric(name, family.documentation, "", data)


def _by_labels(samples: Iterable[Sample]) -> Iterable[Sequence[Sample]]:
    """Groups the samples of a histogram by their labels, but for the bucket's bound."""
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(frozenset(_labels(sample).items()), []).append(sample)
    return groups.values()


def _histogram(samples: Sequence[Sample], began_ns: int, now_ns: int) -> HistogramDataPoint:
    buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if "le" in s.labels]
    buckets.sort()
    counts = [0, *(count for _, count in buckets)]
    return HistogramDataPoint(
        _labels(samples[0]),
        began_ns,
        now_ns,
        count=counts[-1],
        sum=next((s.value for s in samples if s.name.endswith("_sum")), 0.0),
        bucket_counts=[after - before for before, after in pairwise(counts)],
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=None,  # type: ignore[arg-type]  # Prometheus has none, and OTLP needs none
        max=None,  # type: ignore[arg-type]
    )


def _labels(sample: Sample) -> Mapping[str, str]:
    return {name: value for name, value in sample.labels.items() if name != "le"}
