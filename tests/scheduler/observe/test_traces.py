"""The scheduler's spans of a request: its queue, every plan, its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.config import TelemetryConfig
from millrace.core.request import Chunk, RequestState
from millrace.core.scheduler.dispatch.dispatcher import Planned
from millrace.core.scheduler.effects import Record, RunPrefill
from millrace.scheduler.observe.traces import SchedulerTraces
from millrace.telemetry.tracing.files import ReadSpan, read_trace
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer, open_tracer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CHUNKS = (Chunk(index=0, start_token=0, num_tokens=40, instance_ids=("p1",)),)


def parent(*, sampled: bool) -> str:
    return f"00-{TRACE_ID}-00f067aa0ba902b7-{sampled:02x}"


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    return open_tracer(TelemetryConfig(trace_folder=str(tmp_path)), "scheduler", "scheduler-0")


def submitted(tracer: Tracer, *, sampled: bool = True) -> SchedulerTraces:
    traces = SchedulerTraces(tracer)
    traces.submitted("r", parent(sampled=sampled), 1_700_000_000.0)
    return traces


def send(traces: SchedulerTraces, attempt: int) -> None:
    """A step that plans and sends the request to both members of a group."""
    traces.began_step()
    traces.planned(Planned("r", CHUNKS, 0.5, lambda: [(("p1",), 0.5), (("p0", "p1"), 0.75)]))
    for instance in ("p0", "p1"):
        effect = RunPrefill(
            instance_id=instance, request_id="r", chunks=CHUNKS, decode_id="d0", attempt=attempt
        )
        traces.sent(effect)


def recorded(traces: SchedulerTraces, state: RequestState) -> None:
    traces.began_step()
    traces.recorded(Record(request_id="r", state=state, decode_id=None))


def spans(tracer: Tracer, folder: Path) -> list[ReadSpan]:
    tracer.close()
    return read_trace(folder, TRACE_ID)


def test_an_attempt_has_one_queue_time_and_one_plan(tracer: Tracer, tmp_path: Path) -> None:
    traces = submitted(tracer)
    send(traces, 1)
    recorded(traces, RequestState.FINISHED)
    schedule, queued, plan = spans(tracer, tmp_path)
    assert [s.name for s in (schedule, queued, plan)] == ["schedule", "queued", "plan"]
    assert queued.parent_id == plan.parent_id == schedule.span_id
    assert plan.attributes == {
        "millrace.attempt": 1,
        "millrace.decode": "d0",
        "millrace.predicted_ttft_s": 0.5,
        "millrace.chunks": "40 on p1",
        "millrace.alternative.sp1.ttft_s": 0.5,
        "millrace.alternative.sp1.instances": "p1",
        "millrace.alternative.sp2.ttft_s": 0.75,
        "millrace.alternative.sp2.instances": "p0, p1",
    }


def test_another_attempt_waits_again(tracer: Tracer, tmp_path: Path) -> None:
    traces = submitted(tracer)
    send(traces, 1)
    recorded(traces, RequestState.QUEUED)
    send(traces, 2)
    traces.ended("r", "no pages")
    schedule, *rest = spans(tracer, tmp_path)
    attempts = [(s.name, s.attributes["millrace.attempt"]) for s in rest]
    assert attempts == [("queued", 1), ("plan", 1), ("queued", 2), ("plan", 2)]
    assert rest[2].start_ns >= rest[1].start_ns
    assert schedule.error == "no pages"


def test_a_slow_requests_spans_are_exported_when_it_is_named(
    tracer: Tracer, tmp_path: Path
) -> None:
    traces = submitted(tracer, sampled=False)
    send(traces, 1)
    traces.keep([TRACE_ID])
    recorded(traces, RequestState.FINISHED)
    assert [s.name for s in spans(tracer, tmp_path)] == ["schedule", "queued", "plan"]


def test_log_records_name_the_trace(tracer: Tracer) -> None:
    traces = submitted(tracer)
    assert traces.about("r") == {"request_id": "r", "trace_id": TRACE_ID}
    assert traces.about("other") == {"request_id": "other"}
    tracer.close()


def test_without_a_tracer_nothing_is_held() -> None:
    traces = submitted(NO_TRACER)
    send(traces, 1)
    assert traces.about("r") == {"request_id": "r"}
