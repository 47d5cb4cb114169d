"""Waterfalls over OTLP, as a collector receives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from millrace.core.config import TelemetryConfig
from millrace.core.span import Span
from millrace.telemetry.otlp import NoTraces, open_traces
from millrace.telemetry.trace import Waterfall
from support.deadlines import HANG_S

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"

WATERFALL = Waterfall(
    request_id="r1",
    arrival_unix_s=1_700_000_000.0,
    spans=[
        Span(
            name="queued",
            instance_id="scheduler",
            start_s=0.0,
            end_s=0.25,
            attributes={"position": "3"},
        ),
        Span(name="chunk", instance_id="prefill-0", start_s=0.25, end_s=0.5),
    ],
)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(self, request, context):
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, servicer = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def exported(collector: Collector, endpoint: str, traceparent: str) -> dict:
    traces = open_traces(TelemetryConfig(otlp_endpoint=endpoint), "proxy-0")
    traces.export(WATERFALL, traceparent)
    await asyncio.to_thread(traces.close)
    (request,) = collector.received
    (resource_spans,) = request.resource_spans
    names = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert names["service.name"] == "proxy-0"
    return {span.name: span for span in resource_spans.scope_spans[0].spans}


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_spans_hang_below_the_callers_trace(
    collector: tuple[Collector, str], scheme: str
) -> None:
    servicer, address = collector
    spans = await exported(servicer, scheme + address, f"00-{TRACE_ID}-{PARENT_ID}-01")
    assert spans.keys() == {"request", "queued", "chunk"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    request = spans["request"]
    assert request.parent_span_id.hex() == PARENT_ID
    assert {spans[name].parent_span_id for name in ("queued", "chunk")} == {request.span_id}
    base_ns = 1_700_000_000 * 10**9
    times = {n: (s.start_time_unix_nano, s.end_time_unix_nano) for n, s in spans.items()}
    assert times == {
        "request": (base_ns, base_ns + 500_000_000),
        "queued": (base_ns, base_ns + 250_000_000),
        "chunk": (base_ns + 250_000_000, base_ns + 500_000_000),
    }
    assert {a.key: a.value.string_value for a in spans["queued"].attributes} == {
        "millrace.instance_id": "scheduler",
        "millrace.position": "3",
    }


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_without_a_valid_parent_the_request_is_a_root(
    collector: tuple[Collector, str], traceparent: str
) -> None:
    servicer, address = collector
    spans = await exported(servicer, address, traceparent)
    assert spans["request"].parent_span_id == b""
    assert spans["queued"].trace_id == spans["request"].trace_id


async def test_a_caller_that_does_not_sample_is_obeyed(collector: tuple[Collector, str]) -> None:
    servicer, address = collector
    traces = open_traces(TelemetryConfig(otlp_endpoint=address), "proxy-0")
    traces.export(WATERFALL, f"00-{TRACE_ID}-{PARENT_ID}-00")
    await asyncio.to_thread(traces.close)
    assert servicer.received == []


async def test_a_collector_that_is_down_holds_nothing_up() -> None:
    traces = open_traces(TelemetryConfig(otlp_endpoint="127.0.0.1:1"), "proxy-0")
    for _ in range(100):
        traces.export(WATERFALL)
    async with asyncio.timeout(HANG_S):
        await asyncio.to_thread(traces.close)


def test_without_an_endpoint_nothing_leaves() -> None:
    traces = open_traces(TelemetryConfig(), "proxy-0")
    assert isinstance(traces, NoTraces)
    traces.export(WATERFALL)
    traces.close()
