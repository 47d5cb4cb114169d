"""Tools and reasoning in /v1/chat/completions, with the openai client and over plain HTTP."""

from __future__ import annotations

import asyncio
import json

import orjson
import pytest
from tokenizers import AddedToken, Tokenizer

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.proxy.model_card import read_model_card
from millrace.proxy.text.tokenizer import Tokenizer as ProxyTokenizer
from support.gateway import MODEL
from support.tool_model import CALL, FORCED, THOUGHT, TWO, WEATHER, serving

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": WEATHER}


@pytest.fixture
async def stack(tmp_path):
    async with serving(tmp_path) as running:
        yield running


async def ask(stack, reply, **fields):
    stack.fleet.script.reply = reply
    body = {"model": MODEL, "messages": USER, **fields}
    response = await stack.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(stack, reply, **fields):
    stack.fleet.script.reply = reply
    body = {"model": MODEL, "messages": USER, "stream": True, **fields}
    response = await stack.http.post(CHAT, json=body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [orjson.loads(line) for line in lines]


async def prompt_of(stack, **fields):
    """Returns the text of the prompt that the engine gets."""
    stored = []
    original = stack.fleet.place

    def place(spec):
        stored.append(spec.request_id)
        original(spec)

    stack.fleet.place = place
    stack.fleet.script.hold = held = asyncio.Event()
    stack.fleet.script.hold_after = 0
    asking = asyncio.create_task(ask(stack, "ok", **fields))
    await stack.placed()
    ids = await stack.proxy.store.prompt_ids(stored[0])
    held.set()
    await asking
    return stack.fleet.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


async def test_call(stack):
    answer = await ask(stack, CALL, tools=[TOOL])
    [choice] = answer["choices"]
    message = choice["message"]
    [call] = message["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert (call["type"], call["id"][:5]) == ("function", "call_")
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Oslo"}'}
    assert answer["usage"]["completion_tokens"] > 10


async def test_openai_client_streams_calls(stack):
    stack.fleet.script.reply = TWO
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=USER, tools=[TOOL], stream=True, n=2
    )
    text, calls, reasons = {}, {}, {}
    async for chunk in stream:
        [choice] = chunk.choices
        text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
        reasons[choice.index] = choice.finish_reason
        for part in choice.delta.tool_calls or ():
            key = (choice.index, part.index)
            if part.id:
                assert key not in calls and part.type == "function"
                calls[key] = [part.id, part.function.name, ""]
            calls[key][2] += part.function.arguments
    assert text == {0: "Look:", 1: "Look:"}
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    assert sorted(calls) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({call_id for call_id, _, _ in calls.values()}) == 4
    assert [json.loads(calls[0, i][2]) for i in (0, 1)] == [{"place": "Oslo"}, {}]


async def test_arguments_come_in_several_deltas(stack):
    found = await chunks(stack, CALL, tools=[TOOL])
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in found]
    assert len([delta for delta in deltas if delta]) > 3


async def test_only_the_first_call_without_parallel_calls(stack):
    answer = await ask(stack, TWO, tools=[TOOL], parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_no_parsing_without_tools(stack):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        [choice] = (await ask(stack, CALL, **fields))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_text_without_calls(stack):
    [choice] = (await ask(stack, "Hello there", tools=[TOOL], tool_choice="auto"))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello there", "stop")
    assert "tool_calls" not in choice["message"]


async def test_call_that_is_cut_off_ends_by_length(stack):
    stack.fleet.script.finish = "length"
    [choice] = (await ask(stack, CALL[:-20], tools=[TOOL]))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_forced_calls_constrain_the_sampler(stack, choice):
    other = {"type": "function", "function": {"name": "other"}}
    fields = {"tools": [TOOL, other], "tool_choice": choice}
    [answer] = (await ask(stack, FORCED, **fields))["choices"]
    calls = [call["function"] for call in answer["message"]["tool_calls"]]
    assert [json.loads(call["arguments"]) for call in calls] == [{"place": "Oslo"}, {}]
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    constraint = stack.fleet.specs[-1].sampling.constraint
    schema = json.loads(constraint.text)
    assert (constraint.kind, schema["minItems"]) == ("json_schema", 1)
    assert ("maxItems" in schema, "other" in constraint.text) == (
        choice != "required",
        choice == "required",
    )
    found = await chunks(stack, FORCED, **fields)
    parts = [part for c in found for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(p["function"]["arguments"] for p in parts) == '{"place": "Oslo"}{}'


async def test_strict_is_kept_when_a_call_is_forced(stack):
    strict = {"type": "function", "function": {**WEATHER, "strict": True}}
    await ask(stack, FORCED, tools=[strict], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(stack.fleet.specs[-1].sampling.constraint.text)
    assert schema["maxItems"] == 1
    assert schema["$defs"]["function0"] == WEATHER["parameters"]


async def test_a_forced_call_goes_before_the_form_of_the_text(stack):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    fields = {"tools": [TOOL], "tool_choice": "required"}
    for given in ({"type": "json_object"}, schema):
        [choice] = (await ask(stack, FORCED, **fields, response_format=given))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert '"const": "weather"' in stack.fleet.specs[-1].sampling.constraint.text


@pytest.mark.parametrize("strict", [True, False, None])
async def test_free_choice_constrains_nothing(stack, strict):
    """Clients of OpenAI's libraries send `strict` with every tool."""
    tool = {"type": "function", "function": {**WEATHER, "strict": strict}}
    await ask(stack, "Hello", tools=[tool])
    assert stack.fleet.specs[-1].sampling.constraint is None


async def test_legacy_functions(stack):
    [choice] = (await ask(stack, CALL, functions=[WEATHER], function_call="auto"))["choices"]
    called = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    assert choice["message"]["function_call"] == called
    assert choice["finish_reason"] == "function_call"
    found = await chunks(stack, TWO, functions=[WEATHER])
    parts = [c["choices"][0]["delta"].get("function_call", {}) for c in found]
    assert "".join(part.get("name", "") for part in parts) == "weather"
    assert "".join(part.get("arguments", "") for part in parts) == called["arguments"]


async def test_logprobs_and_ids_cover_all_tokens(stack):
    fields = {"tools": [TOOL], "logprobs": True, "return_token_ids": True}
    [choice] = (await ask(stack, CALL, **fields))["choices"]
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == CALL
    found = [chunk["choices"][0] for chunk in await chunks(stack, CALL, **fields)]
    entries = [e for c in found for e in (c["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
    assert [i for c in found for i in c.get("token_ids", ())] == choice["token_ids"]


async def test_template_gets_tools_and_the_history(stack):
    arguments = json.dumps({"place": "Oslo"})
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    text = await prompt_of(stack, messages=messages, tools=[TOOL])
    assert text == (
        f"tools:{json.dumps([TOOL])}\nuser:hi"
        "assistant:<tool_call>f place=Oslo</tool_call>tool:sunny(c1)assistant:"
    )


async def test_template_gets_legacy_calls_as_tool_calls(stack):
    messages = [
        *USER,
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    text = await prompt_of(stack, messages=messages)
    assert text == ("user:hiassistant:<tool_call>f a=1</tool_call>tool:sunny(call00001)assistant:")


async def test_tools_need_a_template_with_calls(tmp_path):
    async with serving(tmp_path, "proxy.tool_parser=none") as other:
        body = {"model": MODEL, "messages": USER, "tools": [TOOL]}
        error = (await other.http.post(CHAT, json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


async def test_parser_by_setting(tmp_path):
    async with serving(tmp_path, "proxy.tool_parser=mistral") as stack:
        [choice] = (await ask(stack, '[TOOL_CALLS]weather[ARGS]{"place": 1}', tools=[TOOL]))[
            "choices"
        ]
    [call] = choice["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert call["function"] == {"name": "weather", "arguments": '{"place": 1}'}


async def test_reasoning(stack):
    [choice] = (await ask(stack, THOUGHT))["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Yes.", "stop")
    assert message["reasoning_content"] == message["reasoning"] == "so it is"
    found = [chunk["choices"][0]["delta"] for chunk in await chunks(stack, THOUGHT)]
    assert "".join(delta.get("content", "") for delta in found) == "Yes."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in found) == "so it is"


async def test_reasoning_that_the_prompt_opens(stack):
    fields = {"chat_template_kwargs": {"think": True}}
    [choice] = (await ask(stack, "so it is</think>Yes.", **fields))["choices"]
    assert choice["message"]["reasoning"] == "so it is"
    assert choice["message"]["content"] == "Yes."


async def test_constrained_answers_do_not_reason(stack):
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"think": True}}
    [choice] = (await ask(stack, '{"a": 1}', **fields))["choices"]
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


async def test_a_schema_that_can_not_be_compiled_names_the_choice(stack):
    function = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/nowhere"}}}}
    body = {"model": MODEL, "messages": USER, "tools": [{"type": "function", "function": function}]}
    response = await stack.http.post(CHAT, json={**body, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


async def test_reasoning_can_be_left_out(stack):
    [choice] = (await ask(stack, THOUGHT, include_reasoning=False))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    found = await chunks(stack, THOUGHT, include_reasoning=False)
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in found)


async def test_reasoning_stays_content_by_setting(tmp_path):
    async with serving(tmp_path, "proxy.reasoning_parser=none") as stack:
        [choice] = (await ask(stack, THOUGHT))["choices"]
    assert choice["message"]["content"] == THOUGHT


def test_special_tokens_of_a_parser_are_not_skipped(tmp_path):
    folder = write_stub_model(tmp_path)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = ProxyTokenizer(read_model_card(folder))
    text = "<|user|>[TOOL_CALLS]mill<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    for kept, wanted in (((), "mill"), (("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]mill")):
        made = tokenizer.detokenizer(None, skip_special_tokens=True, kept=kept)
        assert made.feed(ids) + made.flush() == wanted
    tokenizer.close()


F = {"type": "function", "function": {"name": "f"}}
BAD = [
    ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"functions": [{"name": "f", "parameters": {"type": "array"}}]},
        "functions[0].parameters",
    ),
    ({"functions": [{"name": "f", "strict": "yes"}]}, "functions[0].strict"),
    ({"tools": [F, F]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 7}, "tool_choice"),
    (
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [F], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [F], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    (
        {
            "tools": [F],
            "tool_choice": "required",
            "response_format": {"type": "text"},
            "guided_regex": "a",
        },
        "guided_regex",
    ),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"functions": [{"name": "f"}], "tools": [F]}, "functions"),
    (
        {"messages": [*USER, {"role": "tool", "content": "hi", "tool_call_id": "x"}]},
        "messages[1].tool_call_id",
    ),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].name"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_errors_name_the_field(stack, fields, param):
    response = await stack.http.post(CHAT, json={"model": MODEL, "messages": USER, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
