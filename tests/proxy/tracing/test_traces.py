"""The proxy's own spans, and which traces it asks the other processes to keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from millrace.telemetry.tracing.files import ReadSpan, read_trace
from support.gateway import MODEL, Script, Stack, gateway
from support.live_stack import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_ID = "00f067aa0ba902b7"
LATE = {"x-millrace-ttft-slo-ms": "0.001"}

Traced = Callable[..., AbstractAsyncContextManager[Stack]]


def parent(*, sampled: bool) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{CLIENT_ID}-{sampled:02x}"}


@pytest.fixture
def traced(tmp_path: Path) -> Traced:
    """Opens a proxy that writes its spans to `tmp_path / "traces"`; settings may follow."""

    @asynccontextmanager
    async def opened(*settings: str) -> AsyncIterator[Stack]:
        folder = f"telemetry.trace_folder={tmp_path / 'traces'}"
        async with gateway(tmp_path, folder, *settings) as stack:
            yield stack

    return opened


def spans(tmp_path: Path) -> list[ReadSpan]:
    return read_trace(tmp_path / "traces", TRACE_ID)


def is_empty(tmp_path: Path) -> bool:
    return not any(file.read_text() for file in (tmp_path / "traces").glob("*.jsonl"))


async def test_a_sampled_request_is_traced_below_its_clients_span(
    traced: Traced, tmp_path: Path
) -> None:
    async with traced() as stack:
        answer = (await stack.http.post(CHAT, json=BODY, headers=parent(sampled=True))).json()
        (spec,) = stack.fleet.specs
        text = (
            await stack.http.get(
                "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
            )
        ).text
    assert stack.fleet.kept_traces == []
    request, *below = spans(tmp_path)
    assert (request.name, request.parent_id) == ("request", CLIENT_ID)
    assert spec.traceparent == f"00-{TRACE_ID}-{request.span_id}-01"
    assert {span.parent_id for span in below} == {request.span_id}
    assert [span.name for span in below] == ["tokenise", "record", "place", "answer"]
    assert all(span.attributes["millrace.request_id"] == answer["id"] for span in below)
    tokens = answer["usage"]["completion_tokens"]
    assert below[-1].attributes["millrace.completion_tokens"] == tokens
    exemplars = {
        family.name: sample.exemplar.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    latencies = ("millrace_proxy_ttft_seconds", "millrace_proxy_e2e_seconds")
    assert exemplars == {name: {"trace_id": TRACE_ID} for name in latencies}


async def test_a_quick_request_that_is_not_sampled_leaves_nothing(
    traced: Traced, tmp_path: Path
) -> None:
    async with traced() as stack:
        await stack.http.post(CHAT, json=BODY, headers=parent(sampled=False))
        assert stack.fleet.specs[0].traceparent.endswith("-00")
        assert stack.fleet.kept_traces == []
    assert is_empty(tmp_path)


async def test_a_late_first_token_is_told_before_the_answer_ends(
    traced: Traced, tmp_path: Path
) -> None:
    async with traced() as stack:
        hold = asyncio.Event()
        stack.fleet.script = Script(hold=hold, hold_after=1)
        headers = parent(sampled=False) | LATE
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY, headers=headers))
        await eventually(lambda: stack.fleet.kept_traces == [TRACE_ID])
        assert not asking.done()
        hold.set()
        await asking
        assert stack.fleet.kept_traces == [TRACE_ID]
    request, *_ = spans(tmp_path)
    assert request.attributes["millrace.missed"] == "ttft"


async def test_a_failed_request_is_traced_with_its_error(traced: Traced, tmp_path: Path) -> None:
    async with traced() as stack:
        stack.fleet.script = Script(
            on_submit=lambda spec: stack.fleet.end(spec, "error", "out of pages")
        )
        failed = await stack.http.post(CHAT, json=BODY, headers=parent(sampled=False))
        assert failed.status_code == 500
        await eventually(lambda: stack.fleet.kept_traces == [TRACE_ID])
    request, *_ = spans(tmp_path)
    assert request.error == "out of pages"


async def test_without_a_tail_only_sampled_requests_are_traced(
    traced: Traced, tmp_path: Path
) -> None:
    async with traced("telemetry.trace_tail_spans=0") as stack:
        await stack.http.post(CHAT, json=BODY, headers=parent(sampled=False) | LATE)
        assert stack.fleet.kept_traces == []
    assert is_empty(tmp_path)
