"""Items of the type `item_reference` in the input of /v1/responses, with the openai client."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256

import openai
import pytest

from millrace.core.config import TenantConfig, load_config
from support.gateway import MODEL
from support.stores import private_redis
from support.tool_model import TWO, WEATHER, respond, same_prompt, serving

TOOL = {"type": "function", "strict": None, **WEATHER}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


def reference(item_id):
    return {"type": "item_reference", "id": item_id}


async def input_of(stack, response):
    return (await stack.client.responses.input_items.list(response.id, order="asc")).data


async def test_references_stand_for_the_items_of_stored_responses(stack):
    first = await respond(stack, f"<think>so</think>{TWO}", tools=[TOOL])
    assert [item.type for item in first.output][:2] == ["reasoning", "message"]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
        for item in first.output[2:]
    ]
    items = [USER, *(reference(item.id) for item in first.output), *outputs]
    second = await respond(stack, input=items, tools=[TOOL])
    await respond(stack, input=outputs, previous_response_id=first.id, tools=[TOOL])
    assert same_prompt(stack)
    shown = await input_of(stack, second)
    assert [item.id for item in shown[1:5]] == [item.id for item in first.output]
    assert [item.type for item in shown[1:5]] == [item.type for item in first.output]
    assert "item_reference" not in {item.type for item in shown}


async def test_items_of_an_input_can_be_named_and_named_again(stack):
    first = await respond(stack)
    [given] = await input_of(stack, first)
    items = [reference(given.id), reference(first.output[0].id), {"role": "user", "content": "b"}]
    second = await respond(stack, input=items)
    named = [reference(item.id) for item in await input_of(stack, second)]
    assert len({item["id"] for item in named}) == 3
    await respond(stack, input=named)
    assert same_prompt(stack)
    await respond(stack, input=[{"id": each["id"]} for each in named])
    assert same_prompt(stack)


async def test_ids_of_items_are_unique(stack):
    first = await respond(stack, input=[USER, USER])
    second = await respond(stack, input=[USER, USER])
    items = [*await input_of(stack, first), *await input_of(stack, second)]
    items += [*first.output, *second.output]
    assert len({item.id for item in items}) == len(items) == 6


async def refused(stack, items, client=None):
    """Returns the error of an input, which is a 404."""
    responses = (client or stack.client).responses
    with pytest.raises(openai.NotFoundError) as raised:
        await responses.create(model=MODEL, input=items)
    assert raised.value.code == "item_not_found"
    return raised.value


async def test_unknown_items_are_named(stack):
    kept = await respond(stack)
    lost = await respond(stack, store=False)
    gone = await respond(stack)
    await stack.client.responses.delete(gone.id)
    placed = len(stack.fleet.specs)
    known = kept.output[0].id
    for item_id in ("msg_1", lost.output[0].id, gone.output[0].id, known[:-1] + "7", known + "\n"):
        error = await refused(stack, [USER, reference(known), reference(item_id)])
        assert error.param == "input[2].id"
        assert repr(item_id) in error.message
    assert len(stack.fleet.specs) == placed


async def test_another_key_does_not_see_the_items(tmp_path):
    keys = ("one", "two")
    tenants = {key: TenantConfig(key_sha256=(sha256(key.encode()).hexdigest(),)) for key in keys}
    async with serving(tmp_path, config=replace(load_config(), tenants=tenants)) as stack:
        mine, other = (stack.client.with_options(api_key=name) for name in keys)
        stack.fleet.script.reply = "Good."
        first = await mine.responses.create(model=MODEL, input="hi")
        items = [reference(first.output[0].id), USER]
        assert (await mine.responses.create(model=MODEL, input=items)).output_text == "Good."
        await refused(stack, items, other)


async def test_any_replica_finds_the_items(tmp_path):
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        one, two = [
            await exits.enter_async_context(serving(tmp_path / name, f"store.url={url}"))
            for name in ("a", "b")
        ]
        first = await respond(one)
        second = await respond(two, input=[reference(first.output[0].id), USER])
        assert (await input_of(one, second))[0].id == first.output[0].id


async def test_an_output_may_answer_a_call_by_reference_only_after_it(stack):
    first = await respond(stack, TWO, tools=[TOOL])
    call = first.output[1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, input=[output, reference(call.id)])
    assert raised.value.param == "input[0].call_id"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "item_reference", "id": ""}, "input[0].id"),
        ({"type": "item_reference", "id": "a", "role": "user"}, "input[0].role"),
    ],
)
async def test_errors_name_the_field(stack, item, param):
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, input=[item])
    assert raised.value.param == param


async def test_the_number_of_references_is_limited(stack):
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, input=[reference(f"msg_{i}") for i in range(1025)])
    assert raised.value.param == "input"
    assert "1025" in raised.value.message
