"""Sends waterfalls to an OpenTelemetry collector."""

from __future__ import annotations

from typing import Protocol

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millrace.core.config import TelemetryConfig
from millrace.telemetry.trace import Waterfall


class TraceExporter(Protocol):
    """Takes finished waterfalls."""

    def export(self, waterfall: Waterfall, traceparent: str = "") -> None:
        """Queues a waterfall; never waits. `traceparent` is the caller's W3C trace context."""

    def close(self) -> None:
        """Sends the queued waterfalls; waits a few seconds at most."""


class NoTraces:
    """Drops waterfalls: without an endpoint, traces stay in the process."""

    def export(self, waterfall: Waterfall, traceparent: str = "") -> None:
        return

    def close(self) -> None:
        return


class OtlpTraces:
    """Sends over OTLP/gRPC from a thread of its own; its bounded queue drops the excess."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint` is host:port or an http(s):// URL; only https:// is encrypted."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.namespace": "millrace"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(
                    endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=3
                )
            )
        )
        self._tracer = self._provider.get_tracer("millrace")

    def export(self, waterfall: Waterfall, traceparent: str = "") -> None:
        """Sends one span for the request, below `traceparent`'s, and one span below it for each
        bar.
        """
        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        request = self._tracer.start_span(
            "request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(waterfall, 0.0),
            attributes={"millrace.request_id": waterfall.request_id},
        )
        inside = trace.set_span_in_context(request)
        for bar in waterfall.in_order():
            attributes = {f"millrace.{name}": value for name, value in bar.attributes.items()}
            span = self._tracer.start_span(
                bar.name,
                context=inside,
                start_time=_nanoseconds(waterfall, bar.start_s),
                attributes={"millrace.instance_id": bar.instance_id, **attributes},
            )
            span.end(_nanoseconds(waterfall, bar.end_s))
        request.end(_nanoseconds(waterfall, waterfall.end_s))

    def close(self) -> None:
        self._provider.shutdown()


def _nanoseconds(waterfall: Waterfall, since_arrival_s: float) -> int:
    """Returns the Unix time of a moment of the waterfall, in ns. (Added as integers: a double's
    steps at today's Unix time are 240 ns.)
    """
    return round(waterfall.arrival_unix_s * 1e9) + round(since_arrival_s * 1e9)


def open_traces(config: TelemetryConfig, service: str) -> TraceExporter:
    """Returns the exporter to `config.otlp_endpoint`, or `NoTraces` when that is empty."""
    if config.otlp_endpoint:
        return OtlpTraces(config.otlp_endpoint, service)
    return NoTraces()
