"""Several models at one address: routes, names, canaries, and a list that changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import orjson
import pytest

from millrace.core.config import load_config
from millrace.core.config.models import ModelConfig, models_file
from millrace.core.errors import ModelError
from millrace.event_lines import event_lines
from millrace.proxy.models import models
from millrace.proxy.models.models import is_canary
from millrace.proxy.service import Proxy
from support.batches import quick_batches
from support.live_stack import eventually
from support.metrics import total
from support.tenants import bearer, config_with, tenant_toml
from support.two_models import Two, two_models

__all__ = ["quick_batches"]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def two(tmp_path, request):
    async with two_models(tmp_path, *getattr(request, "param", ())) as running:
        yield running


#: A lost fleet is given up soon.
impatient = pytest.mark.parametrize("two", [["proxy.submit_timeout_s=1"]], indirect=True)


async def posted(two: Two, path: str, /, headers=None, **body):
    answer = await two.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def said(two: Two, name: str, headers=None) -> tuple[str, str]:
    """The model that answers a chat, by its name and by its text."""
    answer = await posted(two, CHAT, headers, model=name, messages=HI)
    return answer["model"], answer["choices"][0]["message"]["content"]


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# -- routes


@pytest.mark.parametrize("name", ["small", "large"])
async def test_every_endpoint_asks_the_model_that_the_body_names(two, name):
    text, other = f"I am {name}", "large" if name == "small" else "small"
    assert await said(two, name) == (name, text)
    completion = await posted(two, COMPLETIONS, model=name, prompt="who?")
    assert (completion["model"], completion["choices"][0]["text"]) == (name, text)
    response = await posted(two, RESPONSES, model=name, input="who?")
    assert (response["model"], response["output"][0]["content"][0]["text"]) == (name, text)
    again = {"model": name, "input": "so?", "previous_response_id": response["id"]}
    assert (await posted(two, RESPONSES, **again))["model"] == name
    for path, texts in (
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert (await posted(two, path, model=name, **texts))["model"] == name
    assert len(two.fleets[name].specs) == 10
    assert not two.fleets[other].specs


async def test_streams_name_their_model(two):
    body = {"model": "large", "messages": HI, "stream": True}
    lines = (await two.http.post(CHAT, json=body)).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"large"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "I am large"


async def test_each_model_has_its_own_tokenizer_and_limits(two):
    text = "Rivers turn wheels and wheels turn stones."
    counts = {}
    for name, context in (("small", 512), ("large", 2048)):
        found = await posted(two, "/tokenize", model=name, prompt=text)
        counts[name] = found["count"]
        assert found["max_model_len"] == context
        back = {"model": name, "tokens": found["tokens"], "skip_special_tokens": True}
        assert (await posted(two, "/detokenize", **back))["prompt"] == text
    assert counts["small"] > counts["large"]  # fewer merges
    token = {"prompt": [350], "max_tokens": 4}
    assert (await posted(two, COMPLETIONS, model="large", **token))["model"] == "large"
    refused = await two.http.post(COMPLETIONS, json={"model": "small", **token})
    assert error_of(refused)[0] == 400
    long = {"prompt": [9] * 600, "max_tokens": 4}
    refused = await two.http.post(COMPLETIONS, json={"model": "small", **long})
    assert error_of(refused)[1] == "context_length_exceeded"
    assert (await posted(two, COMPLETIONS, model="large", **long))["model"] == "large"


async def test_without_a_model_tokens_are_the_first_models(two):
    assert (await posted(two, "/tokenize", prompt="hi"))["max_model_len"] == 512
    assert (await two.http.post(CHAT, json={"messages": HI})).json()["error"]["param"] == "model"


@pytest.mark.usefixtures("quick_batches")
async def test_each_line_of_a_batch_is_answered_by_its_model(two):
    def line(name: str) -> bytes:
        body = {"model": name, "messages": HI}
        request = {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
        return orjson.dumps(request) + b"\n"

    content = b"".join(map(line, ("small", "large", "my-small")))
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", content)}
    file = (await two.http.post("/v1/files", files=form)).json()
    wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = await posted(two, "/v1/batches", **wanted)

    async def ended() -> bool:
        nonlocal batch
        batch = (await two.http.get(f"/v1/batches/{batch['id']}")).json()
        return batch["status"] in ("completed", "failed")

    await eventually(ended)
    assert (batch["status"], batch["model"], batch["errors"]) == ("completed", None, None)
    content = (await two.http.get(f"/v1/files/{batch['output_file_id']}/content")).content
    rows = [orjson.loads(row) for row in content.splitlines()]
    answered = {row["custom_id"]: row["response"]["body"]["model"] for row in rows}
    assert answered == {"small": "small", "large": "large", "my-small": "small"}


# -- names


async def test_models_and_aliases_are_listed(two):
    listed = (await two.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["root"], one["max_model_len"]) for one in listed] == [
        ("small", "small", 512),
        ("my-small", "small", 512),
        ("large", "large", 2048),
        ("my-large", "large", 2048),
    ]
    for one in listed:
        assert (await two.http.get(f"/v1/models/{one['id']}")).json() == one
    assert await said(two, "my-large") == ("large", "I am large")
    document = (await two.http.get("/openapi.json")).json()
    model = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert model["enum"] == ["small", "my-small", "large", "my-large"]


async def test_an_unknown_model_is_answered_with_the_list(two):
    message = "The model 'huge' does not exist; this server has " + ", ".join(
        f"'{name}'" for name in ("small", "my-small", "large", "my-large")
    )
    wanted = (404, "model_not_found", f"{message}.")
    for path, body in ((CHAT, {"messages": HI}), ("/tokenize", {"prompt": "x"})):
        assert error_of(await two.http.post(path, json={"model": "huge", **body})) == wanted
    assert error_of(await two.http.get("/v1/models/huge")) == wanted


async def test_a_tenant_uses_its_models_by_name_or_alias(tmp_path):
    tables = tenant_toml("acme", "sk-1", models=["small"])
    tables += tenant_toml("beta", "sk-2", models=["my-large"])
    config = config_with(tmp_path, tables, "auth.require_key=on")
    async with two_models(tmp_path, config=config) as two:
        acme, beta = bearer("sk-1"), bearer("sk-2")
        assert await said(two, "my-small", acme) == ("small", "I am small")
        assert await said(two, "my-large", beta) == ("large", "I am large")
        for name, key in (("large", acme), ("large", beta), ("small", beta)):
            body = {"model": name, "messages": HI}
            status, code, _ = error_of(await two.http.post(CHAT, json=body, headers=key))
            assert (status, code) == (403, "model_not_allowed")
        for key, names in ((acme, ["small", "my-small"]), (beta, ["my-large"])):
            found = (await two.http.get("/v1/models", headers=key)).json()["data"]
            assert [one["id"] for one in found] == names
            huge = await two.http.get("/v1/models/huge", headers=key)
            assert error_of(huge)[2].endswith(f"this server has {', '.join(map(repr, names))}.")
        text = (await two.http.get("/metrics")).text
        name = "millrace_proxy_tenant_refused_requests_total"
        assert total(text, name, tenant="beta", reason="model_not_allowed") == 2


async def test_metrics_and_the_access_log_name_the_model(tmp_path, caplog):
    caplog.set_level("INFO", "millrace.access")
    async with two_models(tmp_path, "proxy.access_log=on") as two:
        await said(two, "small")
        await said(two, "my-large")
        text = (await two.http.get("/metrics")).text
    for name in ("small", "large"):
        assert total(text, "millrace_proxy_e2e_seconds_count", model=name) == 1
        assert total(text, "millrace_proxy_generated_tokens_total", model=name) > 2
        assert f'millrace_proxy_inflight_requests{{model="{name}"}} 0.0' in text
    access = [record for record in caplog.records if record.name == "millrace.access"]
    logged = [record.model for record in access if record.path == CHAT]
    assert logged == ["small", "large"]


async def test_the_administrator_asks_one_models_scheduler(two):
    assert (await two.http.get("/admin/models")).json() == {"models": ["small", "large"]}
    assert (await two.http.get("/admin/scheduler?model=huge")).status_code == 404
    wanted = {"policy": "edf"}
    changed = await two.http.put("/admin/scheduler?model=my-large", json=wanted)
    assert changed.status_code == 200, changed.text
    assert [two.fleets[name].policy for name in ("small", "large")] == ["fcfs", "edf"]
    assert (await two.http.get("/admin/scheduler")).json()["policy"] == "fcfs"


@impatient
async def test_the_proxy_is_ready_while_one_model_is(two):
    await two.fleets["small"].stop()
    await eventually(lambda: not two.proxy.models.is_ready("small"))
    assert (await two.http.get("/ready")).status_code == 200
    assert (await two.http.post(CHAT, json={"model": "small", "messages": HI})).status_code == 503
    assert (await said(two, "large"))[0] == "large"


# -- canaries


@pytest.mark.parametrize("percent", [0, 0.5, 10, 33, 100])
def test_a_canary_gets_its_share_in_the_long_run(percent):
    count = 40_000
    chosen = sum(is_canary(f"{number:032x}", percent) for number in range(count))
    spread = (count * percent / 100 * (1 - percent / 100)) ** 0.5
    assert abs(chosen - count * percent / 100) <= 4 * spread


def test_a_larger_share_keeps_the_requests_of_a_smaller():
    ids = [f"{number:032x}" for number in range(2000)]
    assert {i for i in ids if is_canary(i, 5)} < {i for i in ids if is_canary(i, 20)}


async def test_a_chosen_id_has_the_same_model_at_every_try(two):
    await two.exchange(two.canary(50), two.listed["large"])
    seen = {}
    for number in range(24):
        header = {"x-millrace-request-id": f"try-{number}"}
        seen[number] = (await said(two, "my-small", header))[0]
    assert set(seen.values()) == {"small", "large"}
    for number, model in seen.items():
        body = {"model": "small", "input": "hi"}
        header = {"x-millrace-request-id": f"try-{number}"}
        assert (await posted(two, RESPONSES, header, **body))["model"] == model
    assert (await said(two, "large"))[0] == "large"


@impatient
async def test_a_canary_that_is_not_ready_gets_no_request(two):
    await two.exchange(two.canary(100), two.listed["large"])
    assert await said(two, "small") == ("large", "I am large")
    await two.fleets["large"].stop()
    await eventually(lambda: not two.proxy.models.is_ready("large"))
    assert await said(two, "small") == ("small", "I am small")


# -- the list changes


async def test_a_model_comes_and_goes_while_streams_run(tmp_path):
    async with two_models(tmp_path, names=["large"]) as two:
        assert (await two.http.get("/v1/models/small")).status_code == 404
        hold = two.fleets["large"].script.hold = asyncio.Event()
        body = {"model": "large", "messages": HI, "stream": True}
        async with two.http.stream("POST", CHAT, json=body) as response:
            lines = event_lines(response)
            await anext(lines)
            await two.exchange(*two.listed.values())
            await two.ready("small")
            assert await said(two, "small") == ("small", "I am small")
            await two.exchange(two.listed["small"])
            gone = await two.http.post(CHAT, json={**body, "stream": False})
            assert error_of(gone)[:2] == (404, "model_not_found")
            text = (await two.http.get("/metrics")).text
            assert total(text, "millrace_proxy_inflight_requests", model="large") == 1
            hold.set()
            rest = "".join([line async for line in lines if line.startswith("data: {")])
        assert "error" not in rest
        assert '"finish_reason":"stop"' in rest
        await eventually(lambda: len(two.proxy.models.all) == 1)
        assert not two.fleets["large"].cancels


async def test_the_file_is_followed_without_a_call(two):
    two.write(replace(two.listed["small"], aliases=("renamed",)), two.listed["large"])

    async def renamed() -> bool:
        return (await two.http.get("/v1/models/renamed")).status_code == 200

    await eventually(renamed)
    assert (await two.http.get("/v1/models/my-small")).status_code == 404


async def test_new_names_leave_a_models_parts_in_place(two):
    before = two.proxy.models.listed
    await two.exchange(two.canary(1), replace(two.listed["large"], aliases=()))
    assert two.proxy.models.listed == before
    await two.exchange(
        two.listed["small"],
        replace(
            two.listed["large"],
            settings={
                "proxy.max_new_tokens": 7,
            },
        ),
    )
    small, large = two.proxy.models.listed
    assert (small, large.limits.config.max_new_tokens) == (before[0], 7)
    assert large is not before[1]


async def test_a_wrong_file_leaves_the_models_as_they_are(two, caplog):
    two.path.write_text("[models.a]\n")
    await two.proxy.models.look()
    assert await said(two, "small") == ("small", "I am small")
    assert "proxy.models_file" in caplog.text
    assert "models.a.model is None" in caplog.text


async def test_a_model_that_can_t_be_read_harms_no_other_and_is_tried_again(
    two, tmp_path, monkeypatch, caplog
):
    moved = tmp_path / "moved"
    new = replace(two.listed["large"], name="new", model=str(moved), aliases=())
    await two.exchange(two.listed["small"], new)
    assert "model new can't be served" in caplog.text
    (tmp_path / "large").rename(moved)
    await two.proxy.models.look()
    assert two.proxy.models.names == ["small", "my-small"]  # not before RETRY_S
    monkeypatch.setattr(models, "RETRY_S", 0.0)
    await two.proxy.models.look()
    assert two.proxy.models.names == ["small", "my-small", "new"]
    await two.ready("new")
    assert await said(two, "new") == ("new", "I am large")


async def test_a_model_without_new_parts_keeps_its_old(two, tmp_path):
    broken = replace(two.listed["small"], model=str(tmp_path / "nowhere"))
    await two.exchange(broken, two.listed["large"])
    assert await said(two, "my-small") == ("small", "I am small")


def test_a_list_without_a_usable_model_stops_the_start(tmp_path):
    path = tmp_path / "models.toml"
    nowhere = ModelConfig(name="a", model=str(tmp_path / "nowhere"), scheduler="h:1")
    path.write_text(models_file([nowhere]))
    with pytest.raises(ModelError, match="nowhere"):
        Proxy(load_config(overrides=[f"proxy.models_file={path}"]))
