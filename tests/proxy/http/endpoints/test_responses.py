"""/v1/responses with the unmodified openai client, on one replica and on two."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256
from itertools import count
from types import SimpleNamespace

import openai
import orjson
import pytest

from millrace.core.config import StoreConfig, TenantConfig, load_config
from millrace.proxy.reply import response
from millrace.state.documents import Change
from millrace.state.open import open_documents
from support.deadlines import HANG_S
from support.gateway import CONTEXT_TOKENS, MODEL, capture_prompts, gateway
from support.stores import private_redis

RESPONSES = "/v1/responses"
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def replicas(tmp_path):
    """Two proxies with the same Redis."""
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        yield [
            await exits.enter_async_context(gateway(tmp_path / name, f"store.url={url}"))
            for name in ("a", "b")
        ]


async def finished(stack, response_id):
    """Returns a background response at its end."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await stack.client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


async def test_answer(stack):
    answer = await stack.client.responses.create(
        model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"}, temperature=0.5
    )
    assert answer.output_text == "Hello there"
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert (answer.metadata, answer.temperature) == ({"a": "b"}, 0.5)
    [spec] = stack.fleet.specs
    assert answer.id == spec.request_id
    usage = answer.usage
    assert usage.input_tokens == spec.prompt_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens == 8
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert spec.sampling.temperature == 0.5


async def test_stream_has_every_event_once_and_in_order(stack):
    stream = await stack.client.responses.create(model=MODEL, input="hi", stream=True)
    events = [event async for event in stream]
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == "Hello there"
    assert events[-4].text == "Hello there"
    assert events[-1].response.output_text == "Hello there"
    assert events[-1].response.usage.output_tokens == 8
    stored = await stack.client.responses.retrieve(events[0].response.id)
    assert stored == events[-1].response


async def test_a_response_has_ended_once(stack, monkeypatch):
    """Its last event and what is stored say the same time."""
    monkeypatch.setattr(response, "time", SimpleNamespace(time=count(1000).__next__))
    stream = await stack.client.responses.create(model=MODEL, input="hi", stream=True)
    *_, last = [event async for event in stream]
    stored = await stack.client.responses.retrieve(last.response.id)
    assert (last.type, stored.completed_at) == ("response.completed", 1000)
    assert stored == last.response


async def test_the_clients_own_stream_helper_gathers_the_response(stack):
    async with stack.client.responses.stream(model=MODEL, input="hi") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "Hello there"


async def test_length_makes_a_response_incomplete(stack):
    stack.fleet.script.finish = "length"
    answer = await stack.client.responses.create(model=MODEL, input="hi", max_output_tokens=7)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert stack.fleet.specs[0].sampling.max_tokens == 7
    stream = await stack.client.responses.create(model=MODEL, input="hi", stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_items_become_the_messages_of_a_chat(stack):
    prompts = capture_prompts(stack)
    await stack.client.responses.create(
        model=MODEL,
        instructions="be brief",
        input=[
            {"role": "user", "content": "a"},
            {"type": "message", "role": "assistant", "content": "b"},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        ],
    )
    assert prompts == [
        "<|bos|><|system|>be brief<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|>"
        "<|assistant|>"
    ]


async def test_a_previous_response_brings_its_history_without_its_instructions(stack):
    prompts = capture_prompts(stack)
    create = stack.client.responses.create
    first = await create(model=MODEL, input="one", instructions="first rule")
    second = await create(model=MODEL, input="two", previous_response_id=first.id)
    await stack.client.responses.delete(first.id)
    third = await create(
        model=MODEL, input="three", previous_response_id=second.id, instructions="last rule"
    )
    said = "<|assistant|>Hello there<|end|>"
    assert prompts[-1] == (
        f"<|bos|><|system|>last rule<|end|><|user|>one<|end|>{said}<|user|>two<|end|>{said}"
        "<|user|>three<|end|><|assistant|>"
    )
    assert "rule" not in prompts[1]
    assert third.previous_response_id == second.id


async def test_delete_and_unknown_ids(stack):
    responses = stack.client.responses
    answer = await responses.create(model=MODEL, input="hi")
    await responses.delete(answer.id)
    for call in (
        responses.retrieve,
        responses.delete,
        responses.cancel,
        responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            await call(answer.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await responses.create(model=MODEL, input="hi", previous_response_id=answer.id)
    assert raised.value.param == "previous_response_id"


async def test_a_response_that_is_not_stored_cannot_be_retrieved(stack):
    answer = await stack.client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.retrieve(answer.id)


async def test_input_items_come_in_pages(stack):
    items = [{"role": "user", "content": text} for text in "abc"]
    answer = await stack.client.responses.create(model=MODEL, input=items)
    pages = stack.client.responses.input_items
    found = [item async for item in pages.list(answer.id, order="asc", limit=2)]
    assert [item.content[0].text for item in found] == ["a", "b", "c"]
    newest = await pages.list(answer.id, limit=1)
    assert newest.data[0].id == found[-1].id
    reply = await stack.http.get(f"{RESPONSES}/{answer.id}/input_items?limit=2")
    assert reply.json()["has_more"] is True
    for query, field in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        reply = await stack.http.get(f"{RESPONSES}/{answer.id}/input_items?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_truncation_drops_the_oldest_messages(stack):
    prompts = capture_prompts(stack)
    items = [{"role": "user", "content": f"{i} " + "word " * 250} for i in range(8)]
    create = stack.client.responses.create
    with pytest.raises(openai.BadRequestError) as raised:
        await create(model=MODEL, input=items, max_output_tokens=9)
    assert raised.value.code == "context_length_exceeded"
    answer = await create(
        model=MODEL, input=items, max_output_tokens=9, truncation="auto", instructions="rule"
    )
    [prompt] = prompts
    assert "rule" in prompt and "<|user|>7 " in prompt and "<|user|>0 " not in prompt
    assert answer.usage.input_tokens + 9 <= CONTEXT_TOKENS
    kept = prompt.count("<|user|>")
    one_message = answer.usage.input_tokens / kept
    assert answer.usage.input_tokens + 9 + one_message > CONTEXT_TOKENS - one_message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "empty_string"),
        ({"input": []}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_content_type",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "x"}]},
            "input[0].type",
            "unsupported_content_type",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 4000}, "max_output_tokens", "context_length_exceeded"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "some"}, "truncation", "invalid_value"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
async def test_wrong_fields_are_named(stack, fields, param, code):
    reply = await stack.http.post(RESPONSES, json={"model": MODEL, "input": "hi", **fields})
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert reply.status_code == (404 if param == "model" else 400)
    assert not stack.fleet.specs


async def test_a_failure_before_the_first_token_is_an_http_error_and_later_an_event(stack):
    def refuse(spec):
        stack.fleet.place(spec)
        stack.fleet.end(spec, "error", "broken")

    script = stack.fleet.script
    script.on_submit = refuse
    with pytest.raises(openai.InternalServerError):
        await stack.client.responses.create(model=MODEL, input="hi", stream=True)
    script.on_submit, script.hold = None, asyncio.Event()
    stream = await stack.client.responses.create(model=MODEL, input="hi", stream=True)
    await stack.begun()
    stack.fleet.end(stack.fleet.specs[-1], "error", "broken")
    events = [event async for event in stream]
    script.hold.set()
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_client_that_leaves_cancels_its_response(stack):
    stack.fleet.script.hold = asyncio.Event()
    async with stack.http.stream(
        "POST", RESPONSES, json={"model": MODEL, "input": "hi", "stream": True}
    ):
        await stack.begun()
    await stack.fleet.cancelled.wait()
    stack.fleet.script.hold.set()
    await stack.idle()


async def test_background_goes_on_without_a_client(stack):
    stack.fleet.script.hold = asyncio.Event()
    answer = await stack.client.responses.create(model=MODEL, input="hi", background=True)
    assert (answer.status, answer.output, answer.background) == ("queued", [], True)
    await stack.begun()
    stack.fleet.script.hold.set()
    found = await finished(stack, answer.id)
    assert (found.status, found.output_text) == ("completed", "Hello there")


async def test_a_background_stream_can_be_read_again_from_any_event_at_any_replica(replicas):
    first, second = replicas
    first.fleet.script.hold = asyncio.Event()
    stream = await first.client.responses.create(
        model=MODEL, input="hi", background=True, stream=True
    )
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    reread = await second.client.responses.retrieve(
        seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
    )
    first.fleet.script.hold.set()
    rest = [event async for event in reread]
    events = seen + rest
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(getattr(e, "delta", "") for e in events) == "Hello there"
    assert rest[-1].response.output_text == "Hello there"


async def test_another_replica_cancels_and_continues_conversations(replicas):
    first, second = replicas
    done = await first.client.responses.create(model=MODEL, input="one")
    prompts = capture_prompts(second)
    await second.client.responses.create(model=MODEL, input="two", previous_response_id=done.id)
    assert "one<|end|><|assistant|>Hello there<|end|><|user|>two" in prompts[0]
    first.fleet.script.hold = asyncio.Event()
    running = await first.client.responses.create(model=MODEL, input="hi", background=True)
    await first.begun()
    cancelled = await second.client.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    await first.fleet.cancelled.wait()
    first.fleet.script.hold.set()
    await first.idle()
    assert (await first.client.responses.retrieve(running.id)).status == "cancelled"
    assert (await first.client.responses.cancel(running.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        await second.client.responses.cancel(done.id)
    with pytest.raises(openai.BadRequestError) as raised:
        await second.client.responses.create(
            model=MODEL, input="hi", previous_response_id=running.id
        )
    assert raised.value.param == "previous_response_id"


async def test_a_response_of_a_dead_replica_is_found_failed(tmp_path):
    async with private_redis() as url:
        documents = open_documents(StoreConfig(url=url))
        body = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
        await documents.create(
            "resp_1",
            tenant="default",
            source=orjson.dumps({"items": [], "history": [], "streams": True}),
            change=Change(body=orjson.dumps(body | {"background": True}), events=[b"{}"]),
            ttl_s=60.0,
        )
        async with gateway(tmp_path, f"store.url={url}") as stack:
            found = await stack.client.responses.retrieve("resp_1")
            assert (found.status, found.error.code) == ("failed", "server_error")
            stream = await stack.client.responses.retrieve("resp_1", stream=True, starting_after=0)
            assert [e.type async for e in stream] == ["response.failed"]
        assert not await documents.update("resp_1", Change(body=b"late"))
        await documents.close()


async def test_a_proxy_that_stops_writes_the_end_of_its_responses(tmp_path):
    async with private_redis() as url:
        async with gateway(tmp_path / "a", f"store.url={url}", "proxy.drain_timeout_s=0") as stack:
            stack.fleet.script.hold = asyncio.Event()
            answer = await stack.client.responses.create(model=MODEL, input="hi", background=True)
            await stack.begun()
            await stack.proxy.stop()
            stack.fleet.script.hold.set()
        async with gateway(tmp_path / "b", f"store.url={url}") as other:
            found = await other.client.responses.retrieve(answer.id)
            assert (found.status, found.error.code) == ("failed", "server_error")


async def test_a_tenant_sees_its_own_responses_only(tmp_path):
    keys = ("one", "two")
    tenants = {key: TenantConfig(key_sha256=(sha256(key.encode()).hexdigest(),)) for key in keys}
    async with gateway(tmp_path, config=replace(load_config(), tenants=tenants)) as stack:
        mine, other = (stack.client.with_options(api_key=name).responses for name in keys)
        answer = await mine.create(model=MODEL, input="hi")
        assert (await mine.retrieve(answer.id)).id == answer.id
        for call in (other.retrieve, other.delete, other.cancel, other.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(answer.id)
        with pytest.raises(openai.NotFoundError):
            await other.create(model=MODEL, input="hi", previous_response_id=answer.id)
        assert (await mine.retrieve(answer.id)).id == answer.id


async def test_only_a_background_stream_is_streamed_again(stack):
    answer = await stack.client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError) as raised:
        await stack.client.responses.retrieve(answer.id, stream=True)
    assert raised.value.param == "stream"
