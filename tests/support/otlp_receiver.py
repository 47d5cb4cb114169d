"""A collector for tests: takes spans, log records and metrics over OTLP/gRPC and keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A span as it came; ids in hexadecimal, times in ns."""

    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedLog:
    """A log record as it came."""

    service: str
    instance: str
    logger: str
    trace_id: str
    time_ns: int
    severity: int
    severity_text: str
    body: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMetric:
    """One export of a metric: the message, and its points by their labels' values."""

    service: str
    instance: str
    message: Any
    points: dict[tuple[str, ...], Any]


@dataclass(slots=True)
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """All that came, in order."""

    spans: list[Received] = field(default_factory=list)
    logs: list[ReceivedLog] = field(default_factory=list)
    metrics: list[ReceivedMetric] = field(default_factory=list)
    endpoint: str = ""

    async def Export(self, request: Any, context: Any) -> Any:
        del context
        for one in request.resource_spans:
            resource = attributes(one.resource.attributes)
            for scope in one.scope_spans:
                self.spans += [received(span, resource) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def metric(self, name: str) -> list[ReceivedMetric]:
        """All exports of a metric."""
        return [metric for metric in self.metrics if metric.message.name == name]

    def trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Export(self, request: Any, context: Any) -> Any:
        del context
        for one in request.resource_logs:
            resource = attributes(one.resource.attributes)
            self._receiver.logs += [
                ReceivedLog(
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                    logger=scope.scope.name,
                    trace_id=record.trace_id.hex(),
                    time_ns=record.time_unix_nano,
                    severity=record.severity_number,
                    severity_text=record.severity_text,
                    body=record.body.string_value,
                    attributes=attributes(record.attributes),
                )
                for scope in one.scope_logs
                for record in scope.log_records
            ]
        return logs_service_pb2.ExportLogsServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Export(self, request: Any, context: Any) -> Any:
        del context
        for one in request.resource_metrics:
            resource = attributes(one.resource.attributes)
            self._receiver.metrics += [
                ReceivedMetric(
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                    message=metric,
                    points={
                        tuple(attributes(point.attributes).values()): point
                        for point in getattr(metric, metric.WhichOneof("data")).data_points
                    },
                )
                for scope in one.scope_metrics
                for metric in scope.metrics
            ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


def received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes(span.attributes),
        events=[(e.name, e.time_unix_nano, attributes(e.attributes)) for e in span.events],
        error=span.status.message if span.status.code == 2 else None,
    )


def attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(receiver), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(receiver), server)
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


def check_nested(spans: Iterable[Received], *, skew_ns: int = 2_000_000) -> None:
    """Every span is of one trace, below a span that is there, and within its time: the processes
    of a test share a clock. A span that an instance records after the answer may end later.
    """
    by_id = {span.span_id: span for span in spans}
    assert len({span.trace_id for span in by_id.values()}) == 1
    (root,) = [span for span in by_id.values() if span.parent_id not in by_id]
    for span in by_id.values():
        assert span.start_ns <= span.end_ns, span
        if span is root:
            continue
        above = by_id[span.parent_id]
        assert above.start_ns - skew_ns <= span.start_ns, (above.name, span)
        if above is not root and span.name != "kv_transfer":
            assert span.end_ns <= above.end_ns + skew_ns, (above.name, span)


def children(spans: Iterable[Received], above: Received) -> list[str]:
    """The names of the spans below a span, in the order in which they began."""
    below = [span for span in spans if span.parent_id == above.span_id]
    return [span.name for span in sorted(below, key=lambda span: (span.start_ns, span.end_ns))]
