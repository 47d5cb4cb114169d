"""Objectives from settings and headers, up to the scheduler's Request."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.config import load_config
from millrace.core.config.models import ModelConfig
from millrace.proxy.service import Proxy, listen
from support.deadlines import HANG_S
from support.gateway import MODEL
from support.live_stack import eventually
from support.scheduler_peers import quick, scheduler

SETTINGS = """
[proxy]
default_ttft_slo_ms = 9000
default_tbt_slo_ms = 900

[slo_classes.chat]
ttft_s = 0.5
tbt_s = 0.05

[slo_classes.document]
ttft_s = 30
e2e_s = 60
"""
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TTFT, TBT, CLASS = "x-millrace-ttft-slo-ms", "x-millrace-tbt-slo-ms", "x-millrace-class"
E2E = "x-millrace-e2e-slo-ms"
DOCUMENT = {"ttft_s": 30.0, "tbt_s": 0.9, "e2e_s": 60.0, "class_name": "document"}


@asynccontextmanager
async def served(folder, settings: str = SETTINGS):
    """Yields a client of a real proxy, with a real scheduler that records its events."""
    file, record = folder / "millrace.toml", folder / "run.jsonl"
    file.write_text(settings)
    write_stub_model(folder)
    async with scheduler(quick(), record=record) as net:
        await net.worker("p0")
        await net.worker("d0")
        config = load_config(file)
        proxy = Proxy(config, ModelConfig(name=MODEL, model=str(folder), scheduler=net.address))
        await proxy.start(listen("127.0.0.1", 0))
        url = f"http://127.0.0.1:{proxy.port}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http:
                await eventually(lambda: proxy.gateway.ready)
                yield proxy, http
        finally:
            proxy.gateway.draining = True
            await proxy.stop()


async def submit(proxy: Proxy, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """Sends a request, and leaves once the scheduler has placed it: no instance answers."""
    sent = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT_BODY, headers=headers))
    await eventually(lambda: any(r.confirmed for r in proxy.gateway.requests) or sent.done())
    assert not sent.done(), sent.result().text
    sent.cancel()
    await asyncio.wait([sent])
    await eventually(lambda: proxy.gateway.inflight == 0)


def requests(folder) -> list[dict]:
    """Returns the recorded request of the scheduler's machine, without default fields."""
    steps = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()[1:]]
    return [s["event"][1]["request"] for s in steps if s["event"][0] == "Submitted"]


async def test_a_header_goes_before_the_class_and_that_before_the_default(tmp_path):
    wanted = [
        ({}, {"ttft_s": 9.0, "tbt_s": 0.9}),
        ({CLASS: "default"}, {"ttft_s": 9.0, "tbt_s": 0.9}),
        ({CLASS: "chat"}, {"ttft_s": 0.5, "tbt_s": 0.05, "class_name": "chat"}),
        ({CLASS: "document"}, DOCUMENT),
        ({E2E: "7000"}, {"ttft_s": 9.0, "tbt_s": 0.9, "e2e_s": 7.0}),
        ({CLASS: "document", E2E: "250"}, DOCUMENT | {"e2e_s": 0.25}),
        ({TTFT: "250"}, {"ttft_s": 0.25, "tbt_s": 0.9}),
        ({CLASS: "chat", TBT: "12.5"}, {"ttft_s": 0.5, "tbt_s": 0.0125, "class_name": "chat"}),
        (
            {CLASS: "document", TTFT: "1e3", TBT: "10"},
            DOCUMENT | {"ttft_s": 1.0, "tbt_s": 0.01},
        ),
    ]
    async with served(tmp_path) as (proxy, http):
        for headers, _ in wanted:
            await submit(proxy, http, headers)
    assert [request["slo"] for request in requests(tmp_path)] == [slo for _, slo in wanted]


async def test_a_class_of_the_name_default_is_for_requests_without_one(tmp_path):
    settings = "[proxy]\ndefault_tbt_slo_ms = 70\ndefault_e2e_slo_ms = 9e3\n"
    settings += "[slo_classes.default]\nttft_s = 2\n"
    async with served(tmp_path, settings) as (proxy, http):
        await submit(proxy, http, {})
        document = (await http.get("/openapi.json")).json()
    assert [request["slo"] for request in requests(tmp_path)] == [
        {"ttft_s": 2.0, "tbt_s": 0.07, "e2e_s": 9.0}
    ]
    parameters = document["paths"]["/v1/completions"]["post"]["parameters"]
    assert {p["name"]: p["schema"] for p in parameters}[CLASS] == {"enum": ["batch", "default"]}


async def test_without_any_setting_there_is_no_objective(tmp_path):
    async with served(tmp_path, "") as (proxy, http):
        await submit(proxy, http, {})
    assert [request["slo"] for request in requests(tmp_path)] == [{}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_is_wrong_reaches_no_scheduler(tmp_path, path):
    body = CHAT_BODY if "chat" in path else {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    async with served(tmp_path) as (_, http):
        sent = await http.post(path, json=body, headers={CLASS: "chats"})
        error = sent.json()["error"]
        assert (sent.status_code, error["param"], error["code"]) == (400, CLASS, "invalid_value")
        assert "must be one of batch, chat, default, document, got 'chats'" in error["message"]
        for name in (TTFT, TBT, E2E):
            for value in ("", "soon", "0", "-5", "nan", "inf", "1e10", "0x10", "1_000", "5 ms"):
                sent = await http.post(path, json=body, headers={name: value})
                error = sent.json()["error"]
                assert (sent.status_code, error["param"]) == (400, name), value
                assert error["type"] == "invalid_request_error"
    assert requests(tmp_path) == []


async def test_the_tenant_of_a_key_reaches_the_scheduler_and_the_key_does_not(tmp_path):
    digest = hashlib.sha256(b"sk-secret").hexdigest()
    async with served(tmp_path, f"[tenants.acme]\nkey_sha256 = '{digest}'\n") as (proxy, http):
        for key in ("sk-secret", "sk-unknown"):
            await submit(proxy, http, {"authorization": f"Bearer {key}"})
    assert [request.get("tenant") for request in requests(tmp_path)] == ["acme", None]
    assert "sk-" not in (tmp_path / "run.jsonl").read_text()
