"""One trace per request across all processes, as a collector receives it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import millrace.profiles
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import evict, get_instances
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, eventually, held, live_stack
from support.otlp_receiver import Received, Receiver, check_nested, children, otlp_receiver
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "llama"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_ID = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_ID}-01"}
#: Times of groups on GPUs, by which the planners plan; instances here are far slower.
PROFILE = Path(millrace.profiles.__file__).parent / "llama3-8b-a100-tp1.json"
SETTINGS = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]


def settings(receiver: Receiver, *more: str) -> list[str]:
    return [*SETTINGS, f"telemetry.otlp_endpoint={receiver.endpoint}", *more]


async def ask(client: httpx.AsyncClient, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    response = await client.post(
        "/v1/completions",
        json={"model": "tiny", "temperature": 0, "ignore_eos": True, **body},
        headers=headers,
    )
    assert response.status_code == 200, response.text
    return response.json()


async def whole(receiver: Receiver, trace_id: str, *parts: str) -> list[Received]:
    """The spans of a trace, once all these parts of it have ended."""

    def complete() -> bool:
        names = [span.name for span in receiver.trace(trace_id)]
        return all(names.count(part) >= parts.count(part) for part in parts)

    await eventually(complete, what=f"a trace with {parts}")
    return receiver.trace(trace_id)


def written(folder: Path) -> list[str]:
    """The ids of all spans in the files of a folder."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [
        span["spanId"]
        for document in map(json.loads, lines)
        for resource in document["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def one(spans: list[Received], name: str, service: str | None = None) -> Received:
    (found,) = [s for s in spans if s.name == name and service in (None, s.service)]
    return found


async def test_a_collector_gets_spans_log_records_and_metrics_of_every_process() -> None:
    more = "telemetry.otlp_logs=on", "telemetry.otlp_metrics_s=1", "proxy.access_log=on"
    async with (
        otlp_receiver() as receiver,
        live_stack(served_folder(MODEL), settings=settings(receiver, *more)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answer = await ask(
            client, SAMPLED | {"x-millrace-trace": "1"}, prompt=prompt(300, 1), max_tokens=70
        )
        spans = await whole(receiver, TRACE_ID, "request", "schedule", "prefill", "decode")
        waterfall = (await client.get(f"/v1/requests/{answer['id']}/trace")).json()
    check_logs_and_metrics(receiver, answer["id"])
    check_nested(spans)
    request = one(spans, "request")
    assert (request.service, request.kind, request.parent_id) == ("proxy", 2, CLIENT_ID)
    assert request.attributes["millrace.request_id"] == answer["id"]
    below = children(spans, request)
    assert below[0] == "tokenise"
    assert sorted(below) == sorted(
        ["tokenise", "record", "place", "answer", "schedule", "prefill", "decode"]
    )
    schedule = one(spans, "schedule", "scheduler")
    assert children(spans, schedule) == ["queued", "plan"]
    plan = one(spans, "plan").attributes
    assert plan["millrace.chunks"] in ("300 on prefill-0", "300 on prefill-1")
    assert plan["millrace.decode"] == "decode-0"
    assert 0 < plan["millrace.predicted_ttft_s"] == plan["millrace.alternative.sp1.ttft_s"]
    prefill = one(spans, "prefill", "prefill")
    assert prefill.attributes["millrace.prompt_tokens"] == 300
    assert {"waiting", "chunk", "kv_handshake", "kv_send"} <= set(children(spans, prefill))
    chunk = one(spans, "chunk")
    assert (chunk.attributes["millrace.tokens"], chunk.instance) == (300, prefill.instance)
    decode = one(spans, "decode", "decode")
    assert decode.attributes["millrace.generated_tokens"] == 70
    assert {"kv_transfer", "first_decode_step", "decode_steps"} <= set(children(spans, decode))
    (moment,) = one(spans, "decode_steps").events
    assert moment[2] == {"millrace.tokens": 64, "millrace.batch": 1}
    assert answer["millrace"]["trace_id"] == TRACE_ID
    assert waterfall == {"object": "millrace.trace", **answer["millrace"]}
    bars = {bar["name"]: bar for bar in waterfall["spans"]}
    assert "queued" in bars
    for name in ("tokenise", "place", "chunk", "kv_transfer", "first_decode_step", "answer"):
        bar, span = bars["chunk 0" if name == "chunk" else name], one(spans, name)
        assert bar["start_s"] == pytest.approx((span.start_ns - request.start_ns) / 1e9, abs=1e-6)
        assert bar["end_s"] == pytest.approx((span.end_ns - request.start_ns) / 1e9, abs=1e-6)


def check_logs_and_metrics(receiver: Receiver, response_id: str) -> None:
    """Of a stack that has answered one request with 70 tokens, and has ended."""
    services = {"proxy", "scheduler", "prefill", "decode"}
    assert {record.service for record in receiver.logs} == services
    (access,) = [one for one in receiver.logs if one.attributes.get("request_id") == response_id]
    assert (access.service, access.trace_id) == ("proxy", TRACE_ID)
    last = {(one.service, one.message.name): one for one in receiver.metrics}
    assert {service for service, _ in last} == services
    made = last["proxy", "millrace_proxy_generated_tokens_total"]
    assert sum(point.as_double for point in made.points.values()) == 70
    steps = last["decode", "millrace_decode_step_seconds"]
    assert sum(point.count for point in steps.points.values()) >= 69


async def test_only_traces_of_slow_and_failed_requests_are_kept(tmp_path: Path) -> None:
    unsampled = ["telemetry.trace_ratio=0", f"telemetry.trace_folder={tmp_path}"]
    async with (
        otlp_receiver() as receiver,
        live_stack(served_folder(MODEL), settings=settings(receiver, *unsampled)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        for seed in range(3):
            await ask(client, {}, prompt=prompt(40, seed), max_tokens=3)
        slow = await ask(
            client, {"x-millrace-ttft-slo-ms": "0.001"}, prompt=prompt(200, 9), max_tokens=5
        )
        await eventually(lambda: receiver.named("decode"), what="the trace of the slow request")
        (decode,) = receiver.named("decode")
        spans = await whole(receiver, decode.trace_id, "request", "schedule", "prefill", "decode")
    assert {span.trace_id for span in receiver.spans} == {decode.trace_id}
    check_nested(spans)
    request = one(spans, "request")
    assert request.attributes["millrace.request_id"] == slow["id"]
    assert "ttft" in request.attributes["millrace.missed"]
    assert one(spans, "plan").attributes["millrace.alternative.sp1.ttft_s"] > 0
    assert sorted(written(tmp_path)) == sorted(span.span_id for span in spans)


@pytest.mark.slow
async def test_a_groups_chunks_are_spans_of_each_member() -> None:
    more = [f"engine.profile={PROFILE}", "scheduler.planner=cdsp", "scheduler.improvement_rate=0"]
    async with (
        otlp_receiver() as receiver,
        live_stack(served_folder(MODEL), settings=settings(receiver, *more)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        await ask(client, SAMPLED, prompt=prompt(2900, 2), max_tokens=2)
        parts = ("request", "schedule", "prefill", "prefill", "decode")
        spans = await whole(receiver, TRACE_ID, *parts)
    check_nested(spans)
    members = [span for span in spans if span.name == "prefill"]
    assert {member.instance for member in members} == {"prefill-0", "prefill-1"}
    for member in members:
        assert {"group_join", "chunk", "ring", "kv_handshake"} <= set(children(spans, member))
    groups = {span.attributes.get("millrace.group") for span in spans if span.name == "chunk"}
    assert 2 in groups
    plan = one(spans, "plan").attributes
    assert {"millrace.alternative.sp1.ttft_s", "millrace.alternative.sp2.ttft_s"} <= plan.keys()


@pytest.mark.slow
async def test_a_mixed_instance_traces_prefill_and_decode() -> None:
    async with otlp_receiver() as receiver:
        options = StackOptions(
            model=str(served_folder(MODEL)),
            model_name="tiny",
            colocated=1,
            colocation="mixed",
            port=0,
            threads=1,
            start_timeout_s=2 * HANG_S,
            settings=[f"engine.kv_bytes={POOL_BYTES}", *settings(receiver)],
        )
        async with (
            Stack(options) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
        ):
            await ask(client, SAMPLED, prompt=prompt(300, 3), max_tokens=4)
            spans = await whole(receiver, TRACE_ID, "request", "schedule", "decode")
    check_nested(spans)
    decode = one(spans, "decode", "mixed")
    assert {"waiting", "chunk", "first_decode_step"} <= set(children(spans, decode))
    assert children(spans, one(spans, "schedule")) == ["queued", "plan"]


@pytest.mark.slow
async def test_a_migrated_request_is_one_trace() -> None:
    async with (
        otlp_receiver() as receiver,
        live_stack(
            served_folder(MODEL),
            decode=2,
            settings=settings(receiver, "telemetry.trace_ratio=0"),
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        scheduler = f"127.0.0.1:{stack.services['scheduler'].port}"
        asked = asyncio.create_task(ask(client, {}, prompt=prompt(60, 4), max_tokens=1500))

        async def runs() -> bool:
            return any(i.role == "decode" and i.running for i in await get_instances(scheduler))

        async with held(stack, runs) as before:
            await evict(scheduler, before, abort=False)
        await asked
        await eventually(lambda: receiver.named("request"), what="the trace")
        (request,) = receiver.named("request")
        spans = await whole(receiver, request.trace_id, "request", *("schedule", "decode") * 2)
        log = stack.services["proxy"].log_path.read_text()
    (line,) = [line for line in log.splitlines() if "is migrated as" in line]
    assert f"trace_id={request.trace_id}" in line
    check_nested(spans)
    decodes = sorted((s for s in spans if s.name == "decode"), key=lambda s: s.start_ns)
    assert [decode.attributes["millrace.end"] for decode in decodes] == ["moved", "length"]
    assert decodes[0].instance == before != decodes[1].instance
    moved = one(spans, "moved", "proxy")
    assert moved.attributes["millrace.instance_id"] == decodes[1].instance
