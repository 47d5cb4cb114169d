"""What holds for every answer: ids, CORS, the access log; time limits and early refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import httpx
import openai
import pytest

from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually
from support.metrics import total
from support.tenants import bearer, config_with, tenant_toml

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "my secret plan"}]}
TTFT = "x-millrace-ttft-slo-ms"
EARLY = "x-millrace-fail-early"
PAGE = {"origin": "https://app.example"}


async def test_every_answer_has_an_id(tmp_path):
    async with gateway(tmp_path) as stack:
        sent = await stack.http.post(CHAT, json=BODY)
        assert sent.headers["x-request-id"] == sent.json()["id"]
        ids = [sent.headers["x-request-id"]]
        for path in ("/health", "/v1/models", "/unknown"):
            ids.append((await stack.http.get(path)).headers["x-request-id"])
        wrong = await stack.http.post(CHAT, json={}, headers={"x-request-id": "mine"})
        ids.append(wrong.headers["x-request-id"])
        assert all(re.fullmatch("req_[0-9a-f]{32}", one) for one in ids[1:])
        assert len(set(ids)) == len(ids)


async def test_a_page_of_an_allowed_origin_may_call_the_api_and_read_its_headers(tmp_path):
    settings = ("proxy.cors_origins=https://app.example, https://b.example", "auth.require_key=on")
    config = config_with(tmp_path / "settings", tenant_toml("acme", "sk-acme"), *settings)
    async with gateway(tmp_path / "model", config=config) as stack:
        asked = {
            **PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await stack.http.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        sent = await stack.http.post(CHAT, json=BODY, headers=PAGE | bearer("sk-acme"))
        assert sent.headers["access-control-allow-origin"] == "https://app.example"
        exposed = sent.headers["access-control-expose-headers"]
        assert "x-ratelimit-remaining-tokens" in exposed and "retry-after" in exposed
        refused = await stack.http.post(CHAT, json=BODY, headers=PAGE)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = asked | {"origin": "https://evil.example"}
        assert (await stack.http.options(CHAT, headers=other)).status_code == 400


async def test_without_the_setting_no_page_may(tmp_path):
    async with gateway(tmp_path) as stack:
        sent = await stack.http.post(CHAT, json=BODY, headers=PAGE)
        assert "access-control-allow-origin" not in sent.headers


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "millrace.access"]


async def test_the_access_log_has_a_record_for_every_request_and_no_text(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = config_with(
        tmp_path / "settings", tenant_toml("acme", "sk-acme"), "proxy.access_log=on"
    )
    async with gateway(tmp_path / "model", config=config) as stack:
        headers = bearer("sk-acme") | {"x-client-request-id": "job 7"}
        sent = await stack.http.post(CHAT, json=BODY, headers=headers)
        await stack.http.post(CHAT + "?x=secret", json=BODY | {"stream": True})
        await stack.http.get("/v1/a%0Ab")
        await stack.http.get("/health")
        await eventually(lambda: len(records(caplog)) == 3)
    one, two, three = records(caplog)
    usage = sent.json()["usage"]
    assert (one.tenant, one.method, one.path, one.status) == ("acme", "POST", CHAT, 200)
    assert (one.request_id, one.client_request_id) == (sent.json()["id"], "job 7")
    assert one.prompt_tokens == usage["prompt_tokens"]
    assert one.generated_tokens == usage["completion_tokens"]
    assert 0 < one.first_byte_s <= one.duration_s
    assert (two.tenant, two.path, two.generated_tokens) == ("default", CHAT, one.generated_tokens)
    assert (three.status, three.path) == (404, "/v1/a%0Ab")
    shown = json.dumps([vars(record) for record in records(caplog)], default=str)
    assert "secret" not in shown and "Hello there" not in shown and "sk-acme" not in shown


async def test_a_client_that_leaves_before_its_answer_is_logged_as_499(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with gateway(tmp_path, "proxy.access_log=on") as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
        sending = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await stack.placed()
        sending.cancel()
        await eventually(lambda: bool(records(caplog)))
    [record] = records(caplog)
    assert record.status == 499
    assert record.prompt_tokens > 0


async def test_an_answer_that_takes_too_long_ends_with_504(tmp_path):
    async with gateway(tmp_path, "proxy.request_timeout_s=0.05") as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
        client = stack.client.with_options(max_retries=3)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**BODY)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
        assert len(stack.fleet.specs) == 1  # the client does not try again
        text = (await stack.http.get("/metrics")).text
        assert total(text, "millrace_proxy_cancelled_requests_total", reason="timeout") == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(tmp_path):
    async with gateway(tmp_path, "proxy.request_timeout_s=0.5") as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), hold_after=1)
        sent = await stack.http.post(CHAT, json=BODY | {"stream": True})
        events = [line[6:] for line in sent.text.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "timeout"


async def sent_with(
    tmp_path, predicted_s: float, headers: dict[str, str], *, is_answered: bool = True
) -> httpx.Response:
    async with gateway(tmp_path) as stack:

        def place(spec) -> None:
            stack.fleet.place(spec, predicted_ttft_s=predicted_s)
            if is_answered:  # its tokens may overtake the prediction, on another stream
                stack.fleet.play_later(spec)

        stack.fleet.script = Script(on_submit=place)
        return await stack.http.post(CHAT, json=BODY, headers=headers)


async def test_a_client_may_ask_for_an_early_error_in_place_of_a_late_answer(tmp_path):
    sent = await sent_with(tmp_path, 7.5, {TTFT: "5000", EARLY: "1"}, is_answered=False)
    error = sent.json()["error"]
    assert (sent.status_code, error["code"]) == (429, "would_be_late")
    assert 7500 <= int(sent.headers["x-millrace-predicted-ttft-ms"]) < 60_000
    assert 3 <= int(sent.headers["retry-after"]) < 60
    assert "the objective is 5 s" in error["message"]


@pytest.mark.parametrize(
    ("predicted_s", "headers"),
    [
        (7.5, {TTFT: "5000"}),
        (7.5, {TTFT: "5000", EARLY: "0"}),
        (7.5, {EARLY: "1"}),
        (0.001, {TTFT: "600000", EARLY: "1"}),
    ],
)
async def test_otherwise_the_answer_comes_late_or_not(tmp_path, predicted_s, headers):
    assert (await sent_with(tmp_path, predicted_s, headers)).status_code == 200


async def test_another_value_of_the_header_is_refused(tmp_path):
    async with gateway(tmp_path) as stack:
        sent = await stack.http.post(CHAT, json=BODY, headers={EARLY: "yes"})
        assert (sent.status_code, sent.json()["error"]["param"]) == (400, EARLY)
