"""Structured output in /v1/responses, with the unmodified openai client."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from support.gateway import MODEL, gateway

RESPONSES = "/v1/responses"


class Place(BaseModel):
    """What the answer holds."""

    name: str
    height: int


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


def constraint_of(stack):
    return stack.fleet.specs[-1].sampling.constraint


async def test_the_clients_parse_helper_gets_an_object_of_its_class(stack):
    stack.fleet.script.reply = '{"name": "Galdhopiggen", "height": 2469}'
    answer = await stack.client.responses.parse(model=MODEL, input="hi", text_format=Place)
    assert answer.output_parsed == Place(name="Galdhopiggen", height=2469)
    assert answer.text.format.name == "Place"
    constraint = constraint_of(stack)
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.text)["required"] == ["name", "height"]
    stored = await stack.client.responses.retrieve(answer.id)
    assert stored.text.format.schema_ == json.loads(constraint.text)


async def test_a_stream_with_a_schema(stack):
    stack.fleet.script.reply = '{"name": "a", "height": 1}'
    helper = stack.client.responses.stream(model=MODEL, input="hi", text_format=Place)
    async with helper as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Place(name="a", height=1)
    assert constraint_of(stack).kind == "json_schema"


async def test_json_object_constrains_and_text_does_not(stack):
    create = stack.client.responses.create
    await create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
    assert constraint_of(stack).kind == "json_object"
    answer = await create(model=MODEL, input="hi", text={"format": {"type": "text"}})
    assert constraint_of(stack) is None
    assert answer.text.format.type == "text"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_a_schema_is_compiled_before_anything_is_queued(stack, fields):
    broken = {"properties": {"messages": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        await stack.client.responses.create(
            model=MODEL,
            input="hi",
            text={"format": {"type": "json_schema", "name": "a", "schema": broken}},
            **fields,
        )
    assert raised.value.param == "text.format.schema"
    assert "'text.format.schema': can't be compiled" in raised.value.message
    assert not stack.fleet.specs


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"type": "json_schema", "schema": {}}, "text.format.name", "missing_required_parameter"),
        ({"type": "json_schema", "name": "a"}, "text.format.schema", "missing_required_parameter"),
        ({"type": "json_object", "schema": {}}, "text.format.schema", "invalid_value"),
        ({"type": "text", "name": "a"}, "text.format.name", "invalid_value"),
        ({"type": "json_schema", "name": "", "schema": {}}, "text.format.name", "empty_string"),
        ({"type": "text", "other": 1}, "text.format.other", "unknown_parameter"),
    ],
)
async def test_wrong_formats_are_named(stack, given, param, code):
    body = {"model": MODEL, "input": "hi", "text": {"format": given}}
    reply = await stack.http.post(RESPONSES, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
    assert f"'{param}'" in error["message"]
    assert not stack.fleet.specs
