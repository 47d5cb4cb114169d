"""/v1/conversations, and responses that continue conversations, with the openai client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256

import openai
import pytest

from millrace.core.config import TenantConfig, load_config
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually
from support.stores import private_redis
from support.tool_model import CALL, WEATHER, respond, same_prompt, serving

CONVERSATIONS = "/v1/conversations"
TOOL = {"type": "function", "strict": None, **WEATHER}


def said(text, role="user"):
    return {"type": "message", "role": role, "content": text}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


async def items_of(stack, conversation, **query):
    query = {"order": "asc", **query}
    return (await stack.client.conversations.items.list(conversation.id, **query)).data


def texts(items):
    return [item.content[0].text for item in items]


async def test_a_conversation_is_created_changed_and_deleted(stack):
    conversations = stack.client.conversations
    made = await conversations.create(items=[said("a")], metadata={"a": "b"})
    assert (made.object, made.id[:5], made.metadata) == ("conversation", "conv_", {"a": "b"})
    assert await conversations.retrieve(made.id) == made
    changed = await conversations.update(made.id, metadata={"c": "d"})
    assert (changed.id, changed.metadata) == (made.id, {"c": "d"})
    assert await conversations.retrieve(made.id) == changed
    assert texts(await items_of(stack, made)) == ["a"]
    gone = await conversations.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(made.id)


async def test_items_are_added_shown_and_deleted(stack):
    items = stack.client.conversations.items
    made = await stack.client.conversations.create()
    added = await items.create(made.id, items=[said(text) for text in "abc"])
    assert texts(added.data) == ["a", "b", "c"]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[2].id)
    one = await items.retrieve(added.data[1].id, conversation_id=made.id)
    assert one == added.data[1]
    assert texts((await items.list(made.id)).data) == ["c", "b", "a"]
    page = await items.list(made.id, order="asc", limit=1, after=added.data[0].id)
    assert (texts(page.data), page.has_more) == (["b"], True)
    assert texts([item async for item in items.list(made.id, limit=2)]) == ["c", "b", "a"]
    assert await items.delete(one.id, conversation_id=made.id) == made
    assert texts(await items_of(stack, made)) == ["a", "c"]
    for wrong in (items.retrieve, items.delete):
        with pytest.raises(openai.NotFoundError) as raised:
            await wrong(one.id, conversation_id=made.id)
        assert raised.value.code == "item_not_found"


async def test_a_response_continues_a_conversation_and_joins_it(stack):
    made = await stack.client.conversations.create(items=[said("a"), said("b", "assistant")])
    first = await respond(stack, "One.", input="c", conversation=made.id)
    assert first.conversation.id == made.id
    await respond(stack, "One.", input=[said("a"), said("b", "assistant"), said("c")])
    assert same_prompt(stack)
    assert texts(await items_of(stack, made)) == ["a", "b", "c", "One."]
    assert (await items_of(stack, made))[3].id == first.output[0].id
    stream = await respond(stack, "Two.", input="d", conversation={"id": made.id}, stream=True)
    events = [event async for event in stream]
    assert events[-1].response.conversation.id == made.id
    kept = texts(await items_of(stack, made))
    assert kept == ["a", "b", "c", "One.", "d", "Two."]
    await respond(stack, input="e", conversation=made.id, store=False)
    assert texts(await items_of(stack, made)) == [*kept, "e", "Good."]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_joins_its_conversation_before_it_is_complete(stack, stream):
    made = await stack.client.conversations.create(items=[said("a"), said("b", "assistant")])
    asked = {"input": "c", "conversation": made.id, "background": True}
    answer = await respond(stack, "One.", stream=stream, **asked)
    if stream:
        events = [event async for event in answer]
        assert (events[-1].type, events[-1].response.conversation.id) == (
            "response.completed",
            made.id,
        )
    else:

        async def is_complete():
            found = await stack.client.responses.retrieve(answer.id)
            return found.status == "completed"

        await eventually(is_complete)
    assert texts(await items_of(stack, made)) == ["a", "b", "c", "One."]
    await respond(stack, "Two.", input="d", conversation=made.id)
    assert texts(await items_of(stack, made)) == ["a", "b", "c", "One.", "d", "Two."]


async def test_a_cancelled_background_response_joins_no_conversation(stack):
    made = await stack.client.conversations.create(items=[said("a")])
    stack.fleet.script = Script(hold=asyncio.Event(), hold_after=1)
    asked = {"model": MODEL, "input": "b", "conversation": made.id, "background": True}
    answer = await stack.client.responses.create(**asked)
    assert (await stack.client.responses.cancel(answer.id)).status == "cancelled"
    await eventually(lambda: stack.proxy.gateway.inflight == 0)
    assert texts(await items_of(stack, made)) == ["a"]


async def test_calls_and_their_outputs_join_a_conversation(stack):
    made = await stack.client.conversations.create()
    first = await respond(stack, CALL, tools=[TOOL], conversation=made.id)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    await respond(stack, input=[output], tools=[TOOL], conversation=made.id)
    kinds = [item.type for item in await items_of(stack, made)]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


async def test_references_among_new_items_are_replaced(stack):
    first = await respond(stack, "One.")
    reference = {"type": "item_reference", "id": first.output[0].id}
    made = await stack.client.conversations.create(items=[said("a"), reference])
    assert texts(await items_of(stack, made)) == ["a", "One."]
    with pytest.raises(openai.NotFoundError) as raised:
        await stack.client.conversations.create(items=[{**reference, "id": "msg_1"}])
    assert raised.value.param == "items[0].id"


async def test_turns_at_the_same_time_all_join(stack):
    made = await stack.client.conversations.create()
    await asyncio.gather(*(respond(stack, input=str(i), conversation=made.id) for i in range(6)))
    found = texts(await items_of(stack, made))
    assert sorted(found) == sorted([*map(str, range(6)), *["Good."] * 6])


async def test_any_replica_has_the_conversation_and_a_turn_joins_once(tmp_path):
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        one, two = [
            await exits.enter_async_context(serving(tmp_path / name, f"store.url={url}"))
            for name in ("a", "b")
        ]
        made = await one.client.conversations.create(items=[said("a")])
        turns = [respond(stack, input="b", conversation=made.id) for stack in (one, two) * 2]
        await asyncio.gather(*turns)
        assert sorted(texts(await items_of(two, made))) == ["Good."] * 4 + ["a"] + ["b"] * 4


async def test_another_key_does_not_see_the_conversation(tmp_path):
    keys = ("one", "two")
    tenants = {key: TenantConfig(key_sha256=(sha256(key.encode()).hexdigest(),)) for key in keys}
    async with gateway(tmp_path, config=replace(load_config(), tenants=tenants)) as stack:
        mine, other = (stack.client.with_options(api_key=name) for name in keys)
        made = await mine.conversations.create(items=[said("a")])
        theirs = other.conversations
        for asking in (
            theirs.retrieve(made.id),
            theirs.update(made.id, metadata={}),
            theirs.delete(made.id),
            theirs.items.create(made.id, items=[said("b")]),
            other.responses.create(model=MODEL, input="hi", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                await asking
            assert raised.value.code == "conversation_not_found"
        assert await mine.conversations.retrieve(made.id) == made


async def test_conversations_and_responses_are_no_documents_of_each_other(stack):
    made = await stack.client.conversations.create(items=[said("a")])
    answer = await respond(stack)
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await stack.client.conversations.delete(answer.id)
    assert await stack.client.conversations.retrieve(made.id) == made


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ("", {"items": [said("a")] * 21}, "items"),
        ("", {"metadata": {"a": 5}}, "metadata.a"),
        ("", {"name": "x"}, "name"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
        ("/items", {"items": [{"role": "user"}]}, "items[0].content"),
    ],
)
async def test_errors_name_the_field(stack, path, body, param):
    made = await stack.client.conversations.create()
    stem = f"{CONVERSATIONS}/{made.id}{path}" if path else CONVERSATIONS
    reply = await stack.http.post(stem, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_1"}, 404, "conversation"),
        ({"conversation": {"id": "resp_1"}}, 404, "conversation"),
        ({"conversation": {}}, 400, "conversation.id"),
        ({"conversation": 5}, 400, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "conversation"),
        ({"conversation": "conv_1", "background": True}, 404, "conversation"),
    ],
)
async def test_errors_of_responses_name_the_field(stack, fields, status, param):
    body = {"model": MODEL, "input": "hi", **fields}
    reply = await stack.http.post("/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert not stack.fleet.specs
