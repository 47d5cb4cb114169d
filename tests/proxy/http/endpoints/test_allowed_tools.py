"""The choice `allowed_tools`, in chats and in responses, with the unmodified openai client."""

from __future__ import annotations

import json

import openai
import pytest

from support.gateway import MODEL
from support.tool_model import CALL, FORCED, WEATHER, serving

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": WEATHER}
OTHER = {"type": "function", "function": {"name": "other"}}
THIRD = {"type": "function", "function": {"name": "third"}}
#: A call of each of two functions.
BOTH = CALL.replace("weather", "other") + "\n" + CALL


def flat(tool):
    """Returns a tool in the form of /v1/responses."""
    return {"type": "function", "parameters": None, "strict": None, **tool["function"]}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def allowed_flat(mode, *names):
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


async def chat(stack, reply, **fields):
    stack.fleet.script.reply = reply
    return await stack.client.chat.completions.create(
        **{"model": MODEL, "messages": USER, "tools": [TOOL, OTHER, THIRD], **fields}
    )


async def respond(stack, reply, **fields):
    stack.fleet.script.reply = reply
    tools = [flat(tool) for tool in (TOOL, OTHER, THIRD)]
    return await stack.client.responses.create(
        **{"model": MODEL, "input": "hi", "tools": tools, **fields}
    )


def schema_of(stack):
    return json.loads(stack.fleet.specs[-1].sampling.constraint.text)


async def test_required_constrains_the_answer_to_the_allowed_tools(stack):
    answer = await chat(stack, FORCED, tool_choice=allowed("required", "weather", "third"))
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "weather"]
    schema = schema_of(stack)
    names = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
    assert (names, "maxItems" in schema) == (["weather", "third"], False)
    await chat(stack, FORCED, tool_choice=allowed("required", "weather"), parallel_tool_calls=False)
    assert schema_of(stack)["maxItems"] == 1


async def test_the_prompt_is_that_of_all_tools(stack):
    """So the prefix that is cached for these tools stays valid."""
    await chat(stack, "Hello")
    for mode in ("auto", "required"):
        await chat(stack, FORCED, tool_choice=allowed(mode, "third"))
        await respond(stack, FORCED, tool_choice=allowed_flat(mode, "third"))
    assert len({spec.prompt_tokens for spec in stack.fleet.specs}) == 1
    assert len({spec.prefix_hashes for spec in stack.fleet.specs}) == 1
    await chat(stack, "Hello", tools=[THIRD])
    assert stack.fleet.specs[-1].prefix_hashes != stack.fleet.specs[0].prefix_hashes


async def test_auto_leaves_out_calls_of_other_tools(stack):
    choice = allowed("auto", "weather")
    [whole] = (await chat(stack, f"Look:{BOTH}", tool_choice=choice)).choices
    assert [call.function.name for call in whole.message.tool_calls] == ["weather"]
    assert (whole.message.content, whole.finish_reason) == ("Look:", "tool_calls")
    assert stack.fleet.specs[-1].sampling.constraint is None
    stream = await chat(stack, BOTH, tool_choice=choice, stream=True)
    parts = [part async for c in stream for part in c.choices[0].delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert "".join(part.function.arguments for part in parts) == '{"place": "Oslo"}'
    [nothing] = (await chat(stack, CALL, tool_choice=allowed("auto", "third"))).choices
    assert (nothing.message.tool_calls, nothing.finish_reason) == (None, "stop")
    first = await chat(stack, BOTH, tool_choice=choice, parallel_tool_calls=False)
    assert [call.function.name for call in first.choices[0].message.tool_calls] == ["weather"]


async def test_responses_have_the_flat_form(stack):
    choice = allowed_flat("required", "weather", "third")
    answer = await respond(stack, FORCED, tool_choice=choice)
    assert [item.name for item in answer.output] == ["weather", "weather"]
    assert answer.to_dict()["tool_choice"] == choice
    assert len(schema_of(stack)["items"]["anyOf"]) == 2
    assert (await stack.client.responses.retrieve(answer.id)).tool_choice == answer.tool_choice
    stream = await respond(stack, BOTH, tool_choice=allowed_flat("auto", "weather"), stream=True)
    events = [event async for event in stream]
    assert [item.name for item in events[-1].response.output] == ["weather"]


async def test_tools_may_be_whole_definitions(stack):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}
    answer = await chat(stack, FORCED, tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize(
    ("choice", "param", "got"),
    [
        (
            allowed("auto", "weather", "g"),
            "tool_choice.allowed_tools.tools[1].function.name",
            "'g'",
        ),
        (allowed("never", "weather"), "tool_choice.allowed_tools.mode", "'never'"),
        (allowed("auto"), "tool_choice.allowed_tools.tools", "empty"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "Missing"),
        (allowed_flat("auto", "weather"), "tool_choice.mode", "mode"),
        ({"type": "file_search"}, "tool_choice.type", "'file_search'"),
    ],
)
async def test_errors_of_chats_name_the_field_and_the_value(stack, choice, param, got):
    with pytest.raises(openai.BadRequestError) as raised:
        await chat(stack, "hi", tool_choice=choice)
    assert raised.value.param == param
    assert got in raised.value.message
    assert not stack.fleet.specs


@pytest.mark.parametrize(
    ("choice", "param", "got"),
    [
        (allowed_flat("auto", "weather", "g"), "tool_choice.tools[1].name", "'g'"),
        (allowed_flat("never", "weather"), "tool_choice.mode", "'never'"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
            "tool_choice.tools[0].type",
            "'mcp'",
        ),
        (allowed("auto", "weather"), "tool_choice.allowed_tools", "allowed_tools"),
    ],
)
async def test_errors_of_responses_name_the_field_and_the_value(stack, choice, param, got):
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, "hi", tool_choice=choice)
    assert raised.value.param == param
    assert got in raised.value.message and f"'{param}'" in raised.value.message
    assert not stack.fleet.specs


async def test_allowed_tools_need_tools(stack):
    with pytest.raises(openai.BadRequestError) as raised:
        await chat(stack, "hi", tools=[], tool_choice=allowed("auto", "weather"))
    assert raised.value.param == "tool_choice"
