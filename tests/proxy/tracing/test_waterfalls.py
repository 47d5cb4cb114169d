"""GET /v1/requests/{id}/trace: the waterfalls of the last requests, and what they may take."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from millrace.core.config import TenantConfig, load_config
from millrace.core.span import Span
from millrace.telemetry.tracing.files import read_trace
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, Stack, gateway

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
BARS = [
    Span(name="queued", instance_id="scheduler", start_s=0.0, end_s=50.0),
    Span(name="chunk", instance_id="prefill-0", start_s=50.0, end_s=50.2, attributes={"n": "4"}),
]


def named(name: str, **more: str) -> dict[str, str]:
    return {"x-millrace-request-id": name, **more}


async def trace(stack: Stack, name: str, **headers: str) -> httpx.Response:
    return await stack.http.get(f"/v1/requests/{name}/trace", headers=headers)


async def test_the_waterfall_is_that_of_the_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(spans=BARS)
        headers = named("mine", **{"x-millrace-trace": "1"})
        answer = (await stack.http.post(CHAT, json=BODY, headers=headers)).json()
        for name in ("mine", answer["id"]):
            found = (await trace(stack, name)).json()
            assert found.pop("object") == "millrace.trace"
            assert found == answer["millrace"]
    bars = {bar["name"]: bar for bar in found["spans"]}
    assert bars["queued"]["start_s"] == bars["place"]["start_s"] > 0.0  # from the submission on
    assert bars["queued"]["end_s"] == 50.0
    assert (bars["chunk"]["instance_id"], bars["chunk"]["attributes"]) == ("prefill-0", {"n": "4"})


async def test_its_bars_are_the_spans_of_the_trace(tmp_path: Path) -> None:
    """The proxy's own spans have one source for the waterfall and for OTLP."""
    settings = (f"telemetry.trace_folder={tmp_path / 'traces'}", "telemetry.trace_ratio=1")
    async with gateway(tmp_path, *settings) as stack:
        answer = (await stack.http.post(CHAT, json=BODY)).json()
        found = (await trace(stack, answer["id"])).json()
    request, *spans = read_trace(tmp_path / "traces", answer["id"])
    assert found["trace_id"] == request.trace_id
    assert [span.name for span in spans] == [bar["name"] for bar in found["spans"]]
    for span, bar in zip(spans, found["spans"], strict=True):
        start_s, end_s = ((at - request.start_ns) / 1e9 for at in (span.start_ns, span.end_ns))
        assert (start_s, end_s) == pytest.approx((bar["start_s"], bar["end_s"]), abs=1e-6)
        for name, value in bar["attributes"].items():
            assert float(value) == pytest.approx(span.attributes[f"millrace.{name}"], rel=1e-5)


async def test_an_open_request_has_its_bars_so_far(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY, headers=named("mine")))
        await asyncio.wait_for(stack.fleet.submitted.wait(), HANG_S)
        await stack.placed()
        found = (await trace(stack, "mine")).json()
        assert [bar["name"] for bar in found["spans"]] == ["tokenise", "record", "place"]
        assert "ttft_ms" not in found
        stack.fleet.script.hold.set()
        await asking


async def test_a_failed_request_says_why(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(
            on_submit=lambda spec: stack.fleet.end(spec, "error", "out of pages")
        )
        await stack.http.post(CHAT, json=BODY, headers=named("mine"))
        found = (await trace(stack, "mine")).json()
    assert found["error"] == "out of pages"
    assert "answer" not in [bar["name"] for bar in found["spans"]]


async def test_the_oldest_make_room(tmp_path: Path) -> None:
    async with gateway(tmp_path, "telemetry.waterfall_bytes=4000") as stack:
        for number in range(20):
            await stack.http.post(CHAT, json=BODY, headers=named(f"r{number}"))
        kept = [(await trace(stack, f"r{number}")).status_code == 200 for number in range(20)]
    assert kept == sorted(kept)  # the last ones
    assert 2 <= sum(kept) <= 10


async def test_none_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    async with gateway(tmp_path, "telemetry.waterfall_bytes=0") as stack:
        await stack.http.post(CHAT, json=BODY, headers=named("mine"))
        refused = await trace(stack, "mine")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")


async def test_tenants_see_their_own_and_administrators_all(tmp_path: Path) -> None:
    tenants = {
        name: TenantConfig(key_sha256=(sha256(name.encode()).hexdigest(),))
        for name in ("ann", "bob")
    }
    config = replace(load_config(), tenants=tenants)
    async with gateway(tmp_path, config=config) as stack:
        ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        answer = (await stack.http.post(CHAT, json=BODY, headers=named("mine", **ann))).json()
        for name in ("mine", answer["id"]):
            assert (await trace(stack, name, **ann)).status_code == 200
            assert (await trace(stack, name, **bob)).status_code == 404
        path = f"/admin/requests/{answer['id']}/trace"
        assert (await stack.http.get(path)).json()["request_id"] == answer["id"]
        other = {"forwarded": "for=10.0.0.1"}
        assert (await stack.http.get(path, headers=other)).status_code == 403
        for suffix in (
            ".2",
            ".c1.2",
            ".3.1",
        ):  # a choice; an adopted one
            moved = await stack.http.get(f"/admin/requests/{answer['id']}{suffix}/trace")
            assert moved.json()["request_id"] == answer["id"]
        two = {"model": MODEL, "prompt": ["one", "two"]}
        answer = (await stack.http.post("/v1/completions", json=two, headers=ann)).json()
        part = await stack.http.get(f"/admin/requests/{answer['id']}-1/trace")
        assert part.json()["more"][0]["request_id"] == f"{answer['id']}-1"
        unknown = await stack.http.get("/admin/requests/nothing/trace")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")
