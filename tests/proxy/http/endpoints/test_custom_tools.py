"""Custom tools in chats and in responses, with the unmodified openai client."""

from __future__ import annotations

import json

import openai
import pytest

from support.gateway import MODEL
from support.tool_model import CALL, TEMPLATE, WEATHER, serving

USER = {"role": "user", "content": "hi"}
WORDS = "\n".join(
    ['start: "begin" NL line+ "end"', 'line: "+" /[a-z"]+/ NL', r"NL: /\n/"],
)
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": WORDS}}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"[0-9]{3}\n"}}
INPUT = 'begin\n+"a"\\é😀\nend'
CALLED = json.dumps({"name": "patch", "arguments": {"input": INPUT}})
REPLY = f"Look:<tool_call>{CALLED}</tool_call>"
TOLD = "grammar in Lark's notation"


def tool(form=None, name="patch"):
    custom = {"name": name, "description": "Patches."}
    return {"type": "custom", "custom": custom | ({} if form is None else {"format": form})}


FUNCTION = {"type": "function", "function": WEATHER}
NAMED = {"type": "custom", "custom": {"name": "patch"}}


def flat(given):
    """Returns a tool of a chat in the form of /v1/responses."""
    kind = given["type"]
    fields = {**given[kind]}
    if (form := fields.get("format")) and "grammar" in form:
        fields["format"] = {"type": "grammar", **form["grammar"]}
    if kind == "function":
        fields = {"parameters": None, "strict": None, **fields}
    return {"type": kind, **fields}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


async def chat(stack, reply, **fields):
    stack.fleet.script.reply = reply
    return await stack.client.chat.completions.create(
        **{"model": MODEL, "messages": [USER], "tools": [tool()], **fields}
    )


async def respond(stack, reply, **fields):
    stack.fleet.script.reply = reply
    return await stack.client.responses.create(
        **{"model": MODEL, "input": "hi", "tools": [flat(tool())], **fields}
    )


def constraint_of(stack):
    return stack.fleet.specs[-1].sampling.constraint


async def streamed(stack, reply, **fields):
    """Returns the pieces of the only call, and its first delta."""
    stream = await chat(stack, reply, stream=True, **fields)
    parts = [
        part.to_dict() async for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert all(part["index"] == 0 for part in parts)
    return [part["custom"]["input"] for part in parts], parts[0]


async def test_call(stack):
    [choice] = (await chat(stack, REPLY)).choices
    [call] = choice.message.tool_calls
    assert (call.type, call.id[:5]) == ("custom", "call_")
    assert (call.custom.name, call.custom.input) == ("patch", INPUT)
    assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")
    assert constraint_of(stack) is None


async def test_streamed_input_is_the_text(stack):
    pieces, first = await streamed(stack, REPLY)
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert "".join(pieces) == INPUT
    assert len(pieces) > 3


async def test_calls_of_functions_beside_it_stay_calls_of_functions(stack):
    answer = await chat(stack, f"{REPLY}\n{CALL}{REPLY[5:]}", tools=[FUNCTION, tool()])
    calls = answer.choices[0].message.tool_calls
    assert [call.type for call in calls] == ["custom", "function", "custom"]
    assert json.loads(calls[1].function.arguments) == {"place": "Oslo"}
    assert calls[0].custom.input == calls[2].custom.input == INPUT


async def test_a_forced_call_of_free_text_is_constrained_to_one_text(stack):
    answer = await chat(stack, f"[{CALLED}]", tools=[FUNCTION, tool()], tool_choice=NAMED)
    assert answer.choices[0].message.tool_calls[0].custom.input == INPUT
    schema = json.loads(constraint_of(stack).text)
    assert schema["maxItems"] == 1
    assert schema["$defs"]["function0"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    await chat(stack, f"[{CALLED}]", tools=[FUNCTION, tool()], tool_choice="required")
    assert len(json.loads(constraint_of(stack).text)["items"]["anyOf"]) == 2


@pytest.mark.parametrize(
    ("form", "kind", "text"), [(LARK, "grammar", INPUT), (DIGITS, "regex", "123\n")]
)
async def test_a_forced_call_with_a_grammar_is_the_whole_answer(stack, form, kind, text):
    """A grammar holds for the text itself, so the answer is that text."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    fields = {"tools": [FUNCTION, tool(form)]}
    for choice in (NAMED, allowed):
        [whole] = (await chat(stack, text, **fields, tool_choice=choice)).choices
        [call] = whole.message.tool_calls
        assert (call.custom.name, call.custom.input) == ("patch", text)
        assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
        constraint = constraint_of(stack)
        assert (constraint.kind, constraint.text) == (kind, form["grammar"]["definition"])
        pieces, _ = await streamed(stack, text, **fields, tool_choice=choice)
        assert "".join(pieces) == text
    await chat(stack, text, tools=[tool(form)], tool_choice="required")
    assert constraint_of(stack) == constraint


async def test_the_template_gets_a_function(tmp_path):
    shown = TEMPLATE.replace("{{ tools | tojson }}", "{{ raise_exception(tools | tojson) }}")
    async with serving(tmp_path, template=shown) as stack:
        with pytest.raises(openai.BadRequestError) as raised:
            await chat(stack, "hi", tools=[tool(LARK)])
    text = raised.value.message
    [given] = json.loads(text[text.index("[") :])
    assert given["function"]["name"] == "patch"
    assert given["function"]["description"] == "Patches."
    parameters = given["function"]["parameters"]
    assert parameters["required"] == ["input"]
    assert parameters["properties"]["input"] == {
        "type": "string",
        "description": f"Text that follows this {TOLD}:\n{WORDS}",
    }


async def test_the_history_shows_calls_as_calls_of_functions(stack):
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": INPUT}}
    arguments = json.dumps({"input": INPUT}, ensure_ascii=False)
    function = {"id": "c1", "type": "function"}
    function["function"] = {"name": "patch", "arguments": arguments}
    told = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    for call in (custom, function):
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        await chat(stack, "ok", messages=[USER, said, told])
    one, two = stack.fleet.specs
    assert one.prefix_hashes == two.prefix_hashes and one.prompt_tokens == two.prompt_tokens


async def test_a_message_comes_back_as_the_client_dumps_it(stack):
    message = (await chat(stack, REPLY)).choices[0].message
    call = message.tool_calls[0]
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = await chat(stack, "Good.", messages=[USER, message.model_dump(), told])
    assert answer.choices[0].message.content == "Good."


async def test_a_response_has_an_item_of_the_call(stack):
    answer = await respond(stack, REPLY)
    message, call = answer.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", INPUT)
    assert (call.id[:4], call.call_id[:5]) == ("ctc_", "call_")
    assert answer.output_text == message.content[0].text == "Look:"
    assert answer.tools[0].to_dict() == flat(tool())
    assert await stack.client.responses.retrieve(answer.id) == answer


async def test_a_response_streams_the_input(stack):
    events = [event async for event in await respond(stack, REPLY, stream=True)]
    kinds = [
        event.type.removeprefix("response.") for event in events if event.type[9:15] == "custom"
    ]
    assert kinds[-1] == "custom_tool_call_input.done" and len(kinds) > 4
    assert set(kinds[:-1]) == {"custom_tool_call_input.delta"}
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == INPUT
    added, ended = (
        [e.item for e in events if e.type == f"response.output_item.{end}"][1]
        for end in ("added", "done")
    )
    assert (added.input, ended.input, added.id) == ("", INPUT, done.item_id)
    assert events[-1].response.output[1] == ended


async def test_outputs_continue_a_response(stack):
    first = await respond(stack, REPLY)
    call = first.output[1]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    second = await respond(stack, "Good.", input=[output], previous_response_id=first.id)
    items = [{"role": "user", "content": "hi"}, *(i.model_dump() for i in first.output), output]
    third = await respond(stack, "Good.", input=items)
    assert second.output_text == third.output_text == "Good."
    assert stack.fleet.specs[-1].prefix_hashes == stack.fleet.specs[-2].prefix_hashes
    listed = await stack.client.responses.input_items.list(third.id, order="asc")
    assert [item.type for item in listed.data] == [
        "message",
        "message",
        "custom_tool_call",
        "custom_tool_call_output",
    ]


async def test_a_response_forces_a_grammar(stack):
    named = {"type": "custom", "name": "patch"}
    tools = [flat(FUNCTION), flat(tool(LARK))]
    answer = await respond(stack, INPUT, tools=tools, tool_choice=named)
    assert [(item.type, item.input) for item in answer.output] == [("custom_tool_call", INPUT)]
    assert constraint_of(stack).text == WORDS
    assert answer.to_dict()["tools"][1] == flat(tool(LARK))


def grammar(syntax, definition):
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


WRONG = [
    ({"tools": [tool(grammar("regex", "(?=a)b"))]}, "tools[0].custom.format", "look-around"),
    ({"tools": [tool(grammar("lark", "start: /a"))]}, "tools[0].custom.format", "compiled"),
    (
        {"tools": [tool(grammar("gbnf", "a"))]},
        "tools[0].custom.format.grammar.syntax",
        "'gbnf'",
    ),
    ({"tools": [tool({"type": "json"})]}, "tools[0].custom.format.type", "'json'"),
    ({"tools": [FUNCTION, tool(), tool()]}, "tools[2].custom.name", "twice"),
    ({"tools": [tool(name="a b")]}, "tools[0].custom.name", "'a b'"),
    (
        {"tools": [FUNCTION, tool(LARK)], "tool_choice": "required"},
        "tools[1].custom.format",
        "forced alone",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "patch"}}},
        "tool_choice.function.name",
        "no function",
    ),
    (
        {"tool_choice": {"type": "custom", "custom": {"name": "g"}}},
        "tool_choice.custom.name",
        "no custom tool of this request: 'g'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "told"), WRONG)
async def test_errors_of_chats_name_the_field_and_the_reason(stack, fields, param, told):
    with pytest.raises(openai.BadRequestError) as raised:
        await chat(stack, "hi", **fields)
    assert raised.value.param == param
    assert told in raised.value.message and f"'{param}'" in raised.value.message
    assert not stack.fleet.specs


@pytest.mark.parametrize(("fields", "param", "told"), WRONG)
async def test_errors_of_responses_name_the_field_and_the_reason(stack, fields, param, told):
    given = {}
    if "tools" in fields:
        given["tools"] = [flat(each) for each in fields["tools"]]
    if choice := fields.get("tool_choice"):
        given["tool_choice"] = flat_choice(choice)
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, "hi", **given)
    for inner in (".custom", ".function", ".grammar"):
        param = param.replace(inner, "")
    assert raised.value.param == param
    assert told in raised.value.message and f"'{param}'" in raised.value.message
    assert not stack.fleet.specs


def flat_choice(choice):
    if isinstance(choice, str):
        return choice
    return {"type": choice["type"], **choice[choice["type"]]}


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"id": "c", "type": "custom"}, "messages[1].tool_calls[0].custom"),
        (
            {"id": "c", "type": "custom", "custom": {"name": "patch"}},
            "messages[1].tool_calls[0].custom.input",
        ),
        ({"id": "c", "type": "function"}, "messages[1].tool_calls[0].function"),
        (
            {"id": "c", "custom": {"name": "patch", "input": ""}},
            "messages[1].tool_calls[0].custom",
        ),
    ],
)
async def test_errors_of_calls_in_the_history_name_the_field(stack, call, param):
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(openai.BadRequestError) as raised:
        await chat(stack, "hi", messages=[USER, said])
    assert raised.value.param == param


async def test_an_output_needs_its_call(stack):
    output = {"type": "custom_tool_call_output", "call_id": "x", "output": "done"}
    with pytest.raises(openai.BadRequestError) as raised:
        await respond(stack, "hi", input=[output])
    assert raised.value.param == "input[0].call_id"
