"""Traces of one process: sampling, the tail, and the spans as a collector and a file have them."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import TelemetryConfig
from millrace.core.errors import ConfigError
from millrace.telemetry.tracing import exporters
from millrace.telemetry.tracing.context import TraceContext
from millrace.telemetry.tracing.files import read_trace
from millrace.telemetry.tracing.tracer import NO_SCOPE, NO_TRACER, Tracer, open_tracer
from support.otlp_receiver import Receiver, otlp_receiver

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
ARRIVAL_S = 1_700_000_000.0
ARRIVAL_NS = 1_700_000_000 * 10**9


def parent(*, sampled: bool) -> str:
    return f"00-{TRACE_ID}-{PARENT_ID}-{sampled:02x}"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with otlp_receiver() as found:
        yield found


def tracer_to(receiver: Receiver, **settings: Any) -> Tracer:
    config = TelemetryConfig(otlp_endpoint=receiver.endpoint, **settings)
    return open_tracer(config, "prefill", "prefill-0")


async def closed(tracer: Tracer) -> None:
    await asyncio.to_thread(tracer.close)


async def test_spans_hang_below_the_callers_span(receiver: Receiver) -> None:
    tracer = tracer_to(receiver)
    scope = tracer.scope(parent(sampled=True), ARRIVAL_S)
    attributes = {"text": "a", "count": 3, "share": 0.5, "cached": True}
    scope.child("chunk", 0.25, 0.5, attributes, [("stop", 0.375, {"layer": 7})])
    scope.end("prefill", 0.125, 0.75, error="out of pages")
    await closed(tracer)
    chunk, prefill = receiver.spans
    assert {span.trace_id for span in receiver.spans} == {TRACE_ID}
    assert (prefill.parent_id, chunk.parent_id) == (PARENT_ID, prefill.span_id)
    assert (chunk.service, chunk.instance) == ("prefill", "prefill-0")
    assert (chunk.start_ns, chunk.end_ns) == (ARRIVAL_NS + 250_000_000, ARRIVAL_NS + 500_000_000)
    assert chunk.attributes == attributes
    assert chunk.events == [("stop", ARRIVAL_NS + 375_000_000, {"layer": 7})]
    assert (prefill.error, chunk.error) == ("out of pages", None)


async def test_the_parent_decides_before_the_ratio(receiver: Receiver) -> None:
    tracer = tracer_to(receiver, trace_ratio=0.0, trace_tail_spans=0)
    tracer.begin(parent(sampled=True), ARRIVAL_S).end("kept", 0.0, 1.0)
    assert not tracer.begin(parent(sampled=False), ARRIVAL_S).records
    assert not tracer.begin("", ARRIVAL_S).records
    await closed(tracer)
    every = tracer_to(receiver, trace_ratio=1.0)
    every.begin(parent(sampled=False), ARRIVAL_S).end("dropped", 0.0, 1.0)
    every.begin("", ARRIVAL_S).end("root", 0.0, 1.0)
    await closed(every)
    assert [span.name for span in receiver.spans] == ["kept", "root"]
    assert receiver.spans[1].parent_id == ""


async def test_the_ratio_is_a_share_of_all_traces() -> None:
    async with otlp_receiver() as receiver:
        tracer = tracer_to(receiver, trace_ratio=0.25)
        sampled = sum(tracer.begin("", ARRIVAL_S).context.sampled for _ in range(4000))
        await closed(tracer)
    assert 800 < sampled < 1200  # seven standard deviations


async def test_an_unsampled_trace_is_exported_once_it_is_wanted(receiver: Receiver) -> None:
    tracer = tracer_to(receiver, trace_ratio=0.0)
    scope, other = tracer.begin("", ARRIVAL_S), tracer.begin("", ARRIVAL_S)
    scope.child("before", 0.0, 1.0)
    other.child("fast", 0.0, 1.0)
    assert not tracer.wants(scope.context.trace_id)
    tracer.keep([scope.context.trace_id])
    assert tracer.wants(scope.context.trace_id)
    scope.child("after", 1.0, 2.0)
    await closed(tracer)
    assert [span.name for span in receiver.spans] == ["before", "after"]


async def test_the_tail_holds_the_newest_traces(receiver: Receiver) -> None:
    tracer = tracer_to(receiver, trace_ratio=0.0, trace_tail_spans=4)
    scopes = [tracer.begin("", ARRIVAL_S) for _ in range(3)]
    for scope in scopes:
        scope.child("first", 0.0, 1.0)
        scope.child("second", 1.0, 2.0)
    tracer.keep([scope.context.trace_id for scope in scopes])
    await closed(tracer)
    kept = {int(span.trace_id, 16) for span in receiver.spans}
    assert kept == {scope.context.trace_id for scope in scopes[1:]}
    assert len(receiver.spans) == 4


def test_costly_attributes_are_computed_only_for_exported_spans(tmp_path: Path) -> None:
    tracer = open_tracer(TelemetryConfig(trace_folder=str(tmp_path), trace_ratio=0.0), "s", "s-0")
    asked = []

    def attributes() -> dict[str, int]:
        asked.append(1)
        return {"cost": 1}

    scope = tracer.begin("", ARRIVAL_S)
    scope.child("plan", 0.0, 1.0, attributes)
    assert not asked
    tracer.keep([scope.context.trace_id])
    assert asked
    tracer.close()


def test_a_file_has_otlp_in_lines_of_json(tmp_path: Path) -> None:
    config = TelemetryConfig(trace_folder=str(tmp_path / "traces"), trace_ratio=1.0)
    tracer = open_tracer(config, "decode", "decode-0")
    scope = tracer.scope(parent(sampled=True), ARRIVAL_S)
    scope.child("step", 0.25, 0.5, {"count": 3, "share": 0.5, "on": True}, [("m", 0.5, {"n": 1})])
    scope.end("decode", 0.0, 1.0, error="lost")
    tracer.close()
    (line,) = (tmp_path / "traces/decode-0.jsonl").read_text().splitlines()
    (of,) = json.loads(line)["resourceSpans"]
    names = {one["key"]: one["value"]["stringValue"] for one in of["resource"]["attributes"]}
    assert (names["service.name"], names["service.instance.id"]) == ("decode", "decode-0")
    step, decode = of["scopeSpans"][0]["spans"]
    assert (step["traceId"], decode["parentSpanId"]) == (TRACE_ID, PARENT_ID)
    assert step["parentSpanId"] == decode["spanId"]
    assert step["startTimeUnixNano"] == str(ARRIVAL_NS + 250_000_000)
    assert step["attributes"] == [
        {"key": "count", "value": {"intValue": "3"}},
        {"key": "share", "value": {"doubleValue": 0.5}},
        {"key": "on", "value": {"boolValue": True}},
    ]
    assert [event["name"] for event in step["events"]] == ["m"]
    assert decode["status"] == {"code": 2, "message": "lost"}


def test_a_full_file_makes_way_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "MAX_FILE_BYTES", 100)
    tracer = open_tracer(TelemetryConfig(trace_folder=str(tmp_path)), "s", "s-0")
    tracer.scope(parent(sampled=True), ARRIVAL_S).end("schedule", 0.0, 1.0)
    tracer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-0.1.jsonl", "s-0.jsonl"]
    assert (tmp_path / "s-0.jsonl").read_bytes() == b""


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """No file may be larger: a write beyond fails as on a full disk, after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_full_disk_has_no_room_for_leaves_no_trace(tmp_path: Path) -> None:
    def write(*names: str) -> None:
        tracer = open_tracer(TelemetryConfig(trace_folder=str(tmp_path)), "s", "s-0")
        scope = tracer.scope(parent(sampled=True), ARRIVAL_S)
        for name in names:
            scope.child(name, 0.0, 0.5)
        scope.end("request", 0.0, 1.0)
        tracer.close()

    write("before")
    with room_for((tmp_path / "s-0.jsonl").stat().st_size + 1000):
        write(*(f"lost-{n}" for n in range(100)))  # and the tracer ends well
    write("after")
    names = {span.name for span in read_trace(tmp_path, TRACE_ID)}
    assert names == {"request", "before", "after"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=r"telemetry\.trace_folder is '.*file'; .* can't be writ"):
        open_tracer(TelemetryConfig(trace_folder=str(taken)), "s", "s-0")


async def test_a_collector_that_is_down_holds_up_nothing() -> None:
    tracer = open_tracer(TelemetryConfig(otlp_endpoint="127.0.0.1:1"), "s", "s-0")
    tracer.scope(parent(sampled=True), ARRIVAL_S).end("schedule", 0.0, 1.0)
    await asyncio.wait_for(closed(tracer), 30)


def test_without_an_exporter_nothing_is_recorded() -> None:
    assert open_tracer(TelemetryConfig(), "s", "s-0") is NO_TRACER
    assert NO_TRACER.scope(parent(sampled=True), ARRIVAL_S) is NO_SCOPE
    assert not NO_SCOPE.records
    NO_SCOPE.child("nothing", 0.0, 1.0)
    NO_SCOPE.end("nothing", 0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
    ],
)
def test_a_malformed_traceparent_counts_as_none(text: str) -> None:
    assert TraceContext.parse(text) is None


@pytest.mark.parametrize("sampled", [True, False])
def test_a_traceparent_is_read_and_written(sampled: bool) -> None:
    context = TraceContext.parse(parent(sampled=sampled))
    assert context == TraceContext(int(TRACE_ID, 16), int(PARENT_ID, 16), sampled)
    assert context.traceparent == parent(sampled=sampled)


def test_a_later_version_may_have_more_fields() -> None:
    assert TraceContext.parse(f"01-{TRACE_ID}-{PARENT_ID}-09-more") == TraceContext(
        int(TRACE_ID, 16), int(PARENT_ID, 16), True
    )
