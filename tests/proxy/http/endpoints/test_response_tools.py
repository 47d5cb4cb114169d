"""Tools and reasoning in /v1/responses, with the unmodified openai client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from support.deadlines import HANG_S
from support.gateway import MODEL, gateway
from support.tool_model import CALL, FORCED, THOUGHT, TWO, WEATHER, serving

RESPONSES = "/v1/responses"
#: What the OpenAI SDKs send: `strict` is true unless a client says otherwise.
TOOL = {"type": "function", "strict": True, **WEATHER}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


async def ask(stack, reply, **fields):
    stack.fleet.script.reply = reply
    return await stack.client.responses.create(**{"model": MODEL, "input": "hi", **fields})


async def stream(stack, reply, **fields):
    return [event async for event in await ask(stack, reply, stream=True, **fields)]


def kinds(events):
    """Returns the types of the events without repeats, each with the index of its item."""
    found = [
        (event.type.removeprefix("response."), getattr(event, "output_index", None))
        for event in events
    ]
    return list(dict.fromkeys(found))


def shape(answer):
    return [(item.type, item.status) for item in answer.output]


def constraint_of(stack):
    return stack.fleet.specs[-1].sampling.constraint


async def prompt_after(stack, reply, **fields):
    """Returns the answer, and the text of its prompt."""
    original, kept = stack.fleet.place, []

    def place(spec):
        kept.append(asyncio.ensure_future(stack.proxy.store.prompt_ids(spec.request_id)))
        original(spec)

    stack.fleet.place = place
    stack.fleet.script.hold, stack.fleet.script.hold_after = asyncio.Event(), 0
    asking = asyncio.create_task(ask(stack, reply, **fields))
    await stack.placed()
    ids = await kept[0]
    stack.fleet.script.hold.set()
    answer = await asking
    stack.fleet.place, stack.fleet.script.hold = original, None
    return answer, stack.fleet.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


async def test_a_call_is_an_item_without_a_message(stack):
    answer = await ask(stack, CALL, tools=[TOOL])
    [call] = answer.output
    assert (call.type, call.status, call.name) == ("function_call", "completed", "weather")
    assert call.arguments == '{"place": "Oslo"}'
    assert (call.id[:3], call.call_id[:5]) == ("fc_", "call_")
    assert (answer.status, answer.output_text) == ("completed", "")
    assert answer.tools[0].to_dict() == TOOL
    assert constraint_of(stack) is None
    assert await stack.client.responses.retrieve(answer.id) == answer


async def test_text_and_two_calls_are_streamed_as_three_items(stack):
    events = await stream(stack, TWO, tools=[TOOL])
    call = ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done")
    assert kinds(events) == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("output_text.delta", 0),
        ("output_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        *((kind, 1) for kind in (*call, "output_item.done")),
        *((kind, 2) for kind in (*call, "output_item.done")),
        ("completed", None),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = {1: "", 2: ""}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.output_index] += event.delta
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == [{"place": "Oslo"}, {}]
    assert [e.arguments for e in done] == list(deltas.values())
    final = events[-1].response
    assert final.output_text == "Look:"
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert final.output == ended
    begun = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in begun] == [item.id for item in ended]
    assert {item.status for item in begun} == {"in_progress"}


async def test_the_clients_own_stream_helper_gathers_calls(stack):
    stack.fleet.script.reply = TWO
    tool = {**TOOL, "parameters": {**WEATHER["parameters"], "additionalProperties": False}}
    async with stack.client.responses.stream(model=MODEL, input="hi", tools=[tool]) as helper:
        final = await helper.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output[1].parsed_arguments == {"place": "Oslo"}


async def test_the_clients_function_tool_comes_with_strict(stack):
    class Weather(BaseModel):
        place: str

    stack.fleet.script.reply = CALL.replace('"weather"', '"Weather"')
    tool = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    assert tool["strict"]
    answer = await stack.client.responses.parse(model=MODEL, input="hi", tools=[tool])
    assert answer.output[0].parsed_arguments == {"place": "Oslo"}


async def test_outputs_continue_a_stored_response(stack):
    first = await ask(stack, TWO, tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": text}
        for item, text in zip(first.output[1:], ("sunny", "rain"), strict=True)
    ]
    _, prompt = await prompt_after(
        stack, "Good.", input=outputs, previous_response_id=first.id, tools=[TOOL]
    )
    one, two = (item.call_id for item in first.output[1:])
    assert prompt.endswith(
        "user:hiassistant:Look:<tool_call>weather place=Oslo</tool_call>"
        f"<tool_call>weather</tool_call>tool:sunny({one})tool:rain({two})assistant:"
    )
    assert prompt.startswith("tools:[")


async def test_a_client_may_send_the_output_back_itself(stack):
    first = await ask(stack, f"<think>so</think>{TWO}", tools=[TOOL], store=False)
    assert first.output[0].type == "reasoning"
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    given = [USER, *first.output, result]
    second, prompt = await prompt_after(stack, "Good.", input=given, store=False)
    assert second.output_text == "Good."
    assert prompt.endswith(f"</tool_call>tool:sunny({call.call_id})assistant:")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_forced_calls_constrain_the_sampler(stack, choice):
    other = {"type": "function", "name": "other", "parameters": None, "strict": False}
    answer = await ask(stack, FORCED, tools=[TOOL, other], tool_choice=choice)
    assert shape(answer) == [("function_call", "completed")] * 2
    schema = json.loads(constraint_of(stack).text)
    assert schema["$defs"]["function0"] == WEATHER["parameters"]
    assert ("maxItems" in schema) == (choice != "required")
    assert answer.to_dict()["tool_choice"] == choice


async def test_only_the_first_call_without_parallel_calls(stack):
    answer = await ask(stack, TWO, tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.parallel_tool_calls is False


async def test_no_calls_without_tools_or_with_the_choice_none(stack):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = await ask(stack, CALL, **fields)
        assert (answer.output_text, shape(answer)) == (CALL, [("message", "completed")])


async def test_a_call_that_is_cut_off_is_incomplete(stack):
    stack.fleet.script.finish = "length"
    answer = await ask(stack, f"Look:{CALL[:-20]}", tools=[TOOL])
    assert shape(answer) == [("message", "completed"), ("function_call", "incomplete")]
    assert answer.status == "incomplete"


async def test_an_empty_answer_has_an_empty_message(stack):
    answer = await ask(stack, "", tools=[TOOL])
    assert (answer.output_text, shape(answer)) == ("", [("message", "completed")])


async def test_a_call_in_the_background(stack):
    answer = await ask(stack, CALL, tools=[TOOL], background=True)
    async with asyncio.timeout(HANG_S):
        while answer.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            answer = await stack.client.responses.retrieve(answer.id)
    assert shape(answer) == [("function_call", "completed")]


async def test_reasoning_is_an_item_before_the_message(stack):
    events = await stream(stack, THOUGHT)
    text = ("delta", "done")
    assert kinds(events)[2:-1] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        *((f"reasoning_text.{end}", 0) for end in text),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        *((f"output_text.{end}", 1) for end in text),
        ("content_part.done", 1),
        ("output_item.done", 1),
    ]
    found = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert len(found) > 1 and "".join(found) == "so it is"
    final = events[-1].response
    reasoning, message = final.output
    assert (reasoning.type, reasoning.summary, reasoning.id[:3]) == ("reasoning", [], "rs_")
    assert [(part.type, part.text) for part in reasoning.content] == [
        ("reasoning_text", "so it is")
    ]
    assert (message.type, final.output_text) == ("message", "Yes.")
    answer = await ask(stack, THOUGHT)
    assert [part.text for part in answer.output[0].content] == ["so it is"]
    assert answer.output_text == "Yes."


async def test_reasoning_that_the_prompt_opens_unless_the_answer_is_constrained(stack):
    think = {"extra_body": {"chat_template_kwargs": {"think": True}}}
    answer = await ask(stack, "so it is</think>Yes.", **think)
    assert (answer.output[0].type, answer.output_text) == ("reasoning", "Yes.")
    text = {"format": {"type": "json_object"}}
    answer = await ask(stack, '{"a": 1}', text=text, **think)
    assert (answer.output_text, shape(answer)) == ('{"a": 1}', [("message", "completed")])


async def test_reasoning_that_never_ends_is_incomplete(stack):
    stack.fleet.script.finish = "length"
    answer = await ask(stack, "<think>so it")
    assert shape(answer) == [("reasoning", "incomplete")]
    assert (answer.status, answer.output_text) == ("incomplete", "")


async def test_the_clients_own_stream_helper_skips_over_reasoning(stack):
    stack.fleet.script.reply = THOUGHT
    async with stack.client.responses.stream(model=MODEL, input="hi") as helper:
        final = await helper.get_final_response()
    assert final.output_text == "Yes."


async def test_reasoning_is_not_shown_to_the_model_again(stack):
    first = await ask(stack, THOUGHT)
    _, prompt = await prompt_after(stack, "Good.", input="and?", previous_response_id=first.id)
    assert prompt == "user:hiassistant:Yes.user:and?assistant:"


async def test_truncation_keeps_the_call_of_the_last_output(stack):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    long = [{"role": "user", "content": f"{i} " + "word " * 250} for i in range(8)]
    given = [call, output, *long, call | {"call_id": "c2"}, output | {"call_id": "c2"}]
    _, prompt = await prompt_after(
        stack, "Good.", input=given, truncation="auto", max_output_tokens=9
    )
    assert prompt.endswith("<tool_call>f</tool_call>tool:sunny(c2)assistant:")
    assert "user:7 " in prompt and "user:0 " not in prompt and "(c1)" not in prompt


F = {"type": "function", "name": "f", "parameters": {}}
CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
BROKEN = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [F, F]}, "tools[1].name"),
        ({"tools": [F | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [F | {"parameters": BROKEN}], "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [F], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"input": [CALL_ITEM | {"namespace": "a"}]}, "input[0].namespace"),
        ({"input": [CALL_ITEM | {"caller": {"type": "program"}}]}, "input[0].caller.type"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]},
            "input[0].call_id",
        ),
    ],
)
async def test_errors_name_the_field(stack, fields, param):
    reply = await stack.http.post(RESPONSES, json={"model": MODEL, "input": "hi", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert f"'{param}'" in error["message"]
    assert not stack.fleet.specs


async def test_a_forced_call_goes_before_the_form_of_the_text(stack):
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    answer = await ask(stack, FORCED, tools=[TOOL], tool_choice="required", text=form)
    assert [item.type for item in answer.output] == ["function_call"] * 2
    assert '"const": "weather"' in constraint_of(stack).text


async def test_items_come_back_as_the_client_dumps_them(stack):
    """With the nulls of fields that only other servers fill."""
    first = await ask(stack, TWO, tools=[TOOL])
    items = [USER, *(item.model_dump() for item in first.output)]
    assert {"caller", "namespace"} <= set(items[-1])
    for item in first.output[1:]:
        told = {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
        items.append({**told, "caller": {"type": "direct"}, "name": "weather", "namespace": None})
    answer = await ask(stack, "Good.", input=items, tools=[TOOL])
    assert answer.output_text == "Good."


async def test_tools_need_a_template_with_calls(tmp_path):
    async with gateway(tmp_path) as other:
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(other, "hi", tools=[TOOL])
    assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")
