"""/v1/batches with the unmodified openai client, on one replica and on two."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import orjson
import pytest

from support.batches import lines, quick_batches
from support.deadlines import HANG_S
from support.gateway import MODEL, gateway
from support.stores import private_redis
from support.tenants import config_with, tenant_toml

__all__ = ["quick_batches"]
pytestmark = pytest.mark.usefixtures("quick_batches")

CHAT = "/v1/chat/completions"


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def upload(stack, content):
    return await stack.client.files.create(file=("in.jsonl", content), purpose="batch")


async def start(stack, content, endpoint=CHAT, **more):
    file = await upload(stack, content)
    return await stack.client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def finished(stack, batch_id):
    async with asyncio.timeout(HANG_S):
        while True:
            found = await stack.client.batches.retrieve(batch_id)
            if found.status in ("completed", "failed", "cancelled", "expired"):
                return found
            await asyncio.sleep(0.01)


async def rows_of(stack, file_id):
    content = (await stack.client.files.content(file_id)).content
    return {row["custom_id"]: row for row in map(orjson.loads, content.splitlines())}


def line(custom_id, url, **body):
    request = {"custom_id": custom_id, "method": "POST", "url": url}
    return orjson.dumps(request | {"body": {"model": MODEL, **body}}) + b"\n"


def chat(custom_id, **body):
    return line(custom_id, CHAT, messages=[{"role": "user", "content": "hi"}], **body)


async def test_messages_come_in_batches(stack):
    url, turns = "/v1/messages", [{"role": "user", "content": "hi"}]
    content = b"".join(
        (
            line("a", url, max_tokens=20, messages=turns),
            line("b", url, max_tokens=20, messages=turns, stream=True),
            line("c", url, messages=turns),
        )
    )
    found = await finished(stack, (await start(stack, content, endpoint=url)).id)
    assert (found.request_counts.completed, found.request_counts.failed) == (1, 2)
    answer = (await rows_of(stack, found.output_file_id))["a"]["response"]
    body = answer["body"]
    assert (body["type"], body["content"][0]["text"]) == ("message", "Hello there")
    assert answer["request_id"] == body["id"]
    usage = found.usage
    counted = body["usage"]
    assert counted["cache_read_input_tokens"] == 3  # as the scripted fleet says
    assert usage.input_tokens == counted["input_tokens"] + 3
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (
        *(3, counted["output_tokens"]),
    )
    refused = await rows_of(stack, found.error_file_id)
    for name, field in (("b", "stream"), ("c", "max_tokens")):
        error = refused[name]["response"]["body"]
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert field in error["error"]["message"]


@pytest.mark.parametrize("path", ["", "/msgbatch_1/results"])
async def test_batches_of_anthropics_api_are_refused_with_the_way_to_go(stack, path):
    refused = await stack.http.post(f"/v1/messages/batches{path}", json={})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["type"] == "not_found_error"
    assert "to /v1/batches, with the endpoint" in error["message"]


async def test_answers_are_those_of_the_endpoint(stack):
    made = await start(stack, chat("a", temperature=0.5) + chat("b"), metadata={"k": "v"})
    assert (made.object, made.status, made.metadata) == ("batch", "validating", {"k": "v"})
    assert made.expires_at - made.created_at == 86400
    found = await finished(stack, made.id)
    assert found.status == "completed"
    assert (found.request_counts.total, found.request_counts.completed) == (2, 2)
    assert (found.error_file_id, found.errors) == (None, None)
    rows = await rows_of(stack, found.output_file_id)
    body = rows["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Hello there"
    assert rows["a"]["response"]["request_id"] == body["id"]
    assert found.usage.output_tokens == 2 * body["usage"]["completion_tokens"]
    assert {spec.slo.class_name for spec in stack.fleet.specs} == {"batch"}
    assert 0.5 in {spec.sampling.temperature for spec in stack.fleet.specs}
    output = await stack.client.files.retrieve(found.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{made.id}_output.jsonl")
    assert [b.id async for b in stack.client.batches.list(limit=1)] == [made.id]


@pytest.mark.parametrize(
    ("url", "body", "text"),
    [
        ("/v1/completions", {"prompt": "hi"}, lambda b: b["choices"][0]["text"]),
        ("/v1/responses", {"input": "hi"}, lambda b: b["output"][0]["content"][0]["text"]),
        ("/v1/embeddings", {"input": "hi"}, lambda b: b["data"][0]["embedding"]),
    ],
)
async def test_other_endpoints(stack, url, body, text):
    wanted = "Hello there"
    if url == "/v1/embeddings":
        stack.fleet.script.vectors = [[0.0] * 7 + [3.0]]
        wanted = [0.0] * 7 + [1.0]
    made = await start(stack, line("a", url, **body), url)
    found = await finished(stack, made.id)
    rows = await rows_of(stack, found.output_file_id)
    answer = rows["a"]["response"]["body"]
    assert text(answer) == wanted
    assert found.usage.input_tokens > 0
    if url == "/v1/responses":  # the output file has it; the store of responses is spared
        with pytest.raises(openai.NotFoundError):
            await stack.client.responses.retrieve(answer["id"])


async def test_refused_requests_have_the_endpoints_errors(stack):
    content = (
        chat("ok")
        + chat("field", temperature=9)
        + chat("streams", stream=True)
        + chat("grammar", structured_outputs={"regex": "("})
        + chat("objectives", millrace={"ttft_slo_ms": 5})
    )
    found = await finished(stack, (await start(stack, content)).id)
    assert (found.status, found.request_counts.failed) == ("completed", 4)
    assert list(await rows_of(stack, found.output_file_id)) == ["ok"]
    rows = await rows_of(stack, found.error_file_id)
    errors = {name: row["response"]["body"]["error"] for name, row in rows.items()}
    assert {row["response"]["status_code"] for row in rows.values()} == {400}
    assert errors["field"]["param"] == "temperature"
    assert errors["streams"]["param"] == "stream"
    assert errors["objectives"]["param"] == "millrace"
    assert errors["grammar"]["param"].startswith("structured_outputs")


async def test_wrong_batches_are_refused_by_name(stack):
    file = await upload(stack, lines(1))
    other = await stack.client.files.create(file=("a", lines(1)), purpose="user_data")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, status, param in (
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": other.id}, 400, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, None),
        ({"unknown": 1}, 400, "unknown"),
    ):
        answer = await stack.http.post("/v1/batches", json=good | wrong)
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert param is None or error["param"] == param
    for call in (stack.client.batches.retrieve, stack.client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call("batch_none")


async def test_cancel_from_another_replica_ends_the_requests(tmp_path):
    files = f"files.url={tmp_path / 'files'}"
    async with (
        private_redis() as redis,
        gateway(tmp_path / "a", f"store.url={redis}", files) as one,
        gateway(tmp_path / "b", f"store.url={redis}", files, "batches.max_running=0") as two,
    ):
        one.fleet.script.hold = asyncio.Event()
        made = await start(two, chat("a") + chat("b"))
        await one.begun()
        cancelling = await two.client.batches.cancel(made.id)
        assert cancelling.status == "cancelling"
        found = await finished(two, made.id)
        assert (found.status, found.output_file_id) == ("cancelled", None)
        await one.idle()
        assert {cancel.request_id for cancel in one.fleet.cancels} == {
            spec.request_id for spec in one.fleet.specs
        }
        with pytest.raises(openai.BadRequestError):
            await two.client.batches.cancel(made.id)


async def test_a_replica_that_shuts_down_hands_its_batch_to_another(tmp_path):
    files = f"files.url={tmp_path / 'files'}"
    async with private_redis() as redis:
        async with gateway(tmp_path / "a", f"store.url={redis}", files) as one:
            one.fleet.script.hold = asyncio.Event()
            made = await start(one, chat("a") + chat("b"))
            await one.begun()
            await one.proxy.stop()
        async with gateway(tmp_path / "b", f"store.url={redis}", files) as two:
            found = await finished(two, made.id)
            assert found.request_counts.completed == 2
            assert sorted(await rows_of(two, found.output_file_id)) == ["a", "b"]


async def test_batches_run_in_the_name_of_their_tenant(tmp_path):
    limits = {"slo_classes": ["default"]}  # of clients: batches have a class of their own
    config = config_with(tmp_path, tenant_toml("acme", "acme-key", **limits))
    async with gateway(tmp_path, config=config) as stack:
        acme = replace(stack, client=stack.client.with_options(api_key="acme-key"))
        made = await start(acme, chat("a"))
        found = await finished(acme, made.id)
        assert [spec.tenant for spec in stack.fleet.specs] == ["acme"]
        assert [b.id async for b in stack.client.batches.list()] == []
        for call, name in (
            (stack.client.batches.retrieve, made.id),
            (stack.client.files.content, found.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(name)


async def test_metrics_count_states_and_requests(stack):
    await finished(stack, (await start(stack, chat("a") + chat("b", n=0))).id)
    text = (await stack.http.get("/metrics")).text
    for sample in (
        'millrace_proxy_batch_changes_total{state="validating"} 1.0',
        'millrace_proxy_batch_changes_total{state="completed"} 1.0',
        'millrace_proxy_batch_requests_total{result="completed"} 1.0',
        'millrace_proxy_batch_requests_total{result="failed"} 1.0',
    ):
        assert sample in text
