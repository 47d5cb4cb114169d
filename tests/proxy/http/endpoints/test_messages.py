"""/v1/messages with the unmodified anthropic client."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import httpx2
import pytest
import pytest_asyncio
from pydantic import BaseModel

from support.deadlines import HANG_S
from support.gateway import MODEL, Script, capture_prompts
from support.metrics import total
from support.tenants import config_with, tenant_toml
from support.tool_model import CALL, FORCED, TEMPLATE, THOUGHT, TWO, WEATHER, serving

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "weather", "description": "W.", "input_schema": WEATHER["parameters"]}
USER = {"role": "user", "content": "hi"}
BODY = {"model": MODEL, "max_tokens": 300, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TABLES = tenant_toml("acme", "sk-acme", requests_per_minute=1) + tenant_toml(
    "narrow", "sk-narrow", models=["another"]
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def client_of(stack, key="none"):
    # Without `verify`: reading the authorities takes 20 ms, and there is no TLS.
    async with (
        httpx2.AsyncClient(trust_env=False, verify=False) as transport,
        anthropic.AsyncAnthropic(
            base_url=stack.url,
            api_key=key,
            max_retries=0,
            timeout=HANG_S,
            http_client=transport,
        ) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory):
    """A stack, and a client of it."""
    folder = tmp_path_factory.mktemp("messages")
    async with serving(folder / "model") as stack, client_of(stack) as client:
        yield stack, client


@pytest.fixture
def stack(running):
    found, _ = running
    found.fleet.script = Script()
    found.fleet.specs.clear()
    return found


@pytest.fixture
def client(running):
    return running[1]


async def ask(client, stack, reply, **fields):
    stack.fleet.script.reply = reply
    return await client.messages.create(**BODY | fields)


async def streamed(client, stack, reply, **fields):
    """Returns the events, and the message that the client makes of the same answer."""
    events = [event async for event in await ask(client, stack, reply, stream=True, **fields)]
    async with client.messages.stream(**BODY | fields) as helper:
        return events, await helper.get_final_message()


def kinds(events):
    """Returns the types of the events without repeats, each with the index of its block."""
    return list(dict.fromkeys((event.type, getattr(event, "index", None)) for event in events))


def block(index):
    return [(f"content_block_{part}", index) for part in ("start", "delta", "stop")]


def shape(message):
    return [part.type for part in message.content]


async def test_answer(client, stack):
    more = {"temperature": 0.5, "top_k": 7, "seed": 9}
    answer = await ask(client, stack, "Hello there", extra_body=more)
    [part] = answer.content
    assert (part.type, part.text) == ("text", "Hello there")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    [spec] = stack.fleet.specs
    assert answer.id == spec.request_id and answer.id.startswith("msg_")
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 9)
    assert sampling.max_tokens == 300
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (3, 8)
    assert usage.input_tokens + 3 == spec.prompt_tokens
    assert (await client.messages.count_tokens(model=MODEL, messages=[USER])).input_tokens == (
        spec.prompt_tokens
    )


async def test_stream(client, stack):
    events, final = await streamed(client, stack, "Hello there")
    ends = [("message_start", None), ("message_delta", None), ("message_stop", None)]
    assert kinds(events) == [ends[0], *block(0), *ends[1:]]
    deltas = [e.delta.text for e in events if e.type == "content_block_delta"]
    assert len(deltas) > 1 and "".join(deltas) == "Hello there" == final.content[0].text
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 8)
    assert final.usage.input_tokens == events[0].message.usage.input_tokens > 0
    assert final.usage.cache_read_input_tokens == 3


async def test_raw_events_have_their_type_and_the_answer_its_headers(stack):
    reply = await stack.http.post(MESSAGES, json=BODY | {"stream": True})
    lines = reply.text.split("\n\n")[:-1]
    for line in lines:
        name, data = line.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert reply.headers["request-id"] == stack.fleet.specs[-1].request_id


async def test_thinking_is_a_block_before_the_text(client, stack):
    events, final = await streamed(client, stack, THOUGHT)
    assert kinds(events)[1:-2] == [*block(0), *block(1)]
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert [(p.type, getattr(p, p.type)) for p in final.content] == [
        ("thinking", "so it is"),
        ("text", "Yes."),
    ]
    assert (await ask(client, stack, THOUGHT)).content[0].to_dict() == final.content[0].to_dict()


@pytest.mark.parametrize(
    ("thinking", "types"),
    [
        ({"type": "enabled", "budget_tokens": 20}, ["thinking", "text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, ["text"]),
        ({"type": "disabled"}, ["text"]),
    ],
)
async def test_thinking_is_shown_if_it_is_wanted(client, stack, thinking, types):
    assert shape(await ask(client, stack, THOUGHT, thinking=thinking)) == types
    budget = stack.fleet.specs[-1].sampling.reasoning
    assert (budget and budget.max_tokens) == thinking.get("budget_tokens")


async def test_tools_round_trip(client, stack):
    prompts = capture_prompts(stack)
    events, first = await streamed(client, stack, f"<think>so</think>{TWO}", tools=[TOOL])
    assert kinds(events)[1:-2] == [
        *block(0),
        *block(1),
        *block(2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
    ]
    assert shape(first) == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    one, two = first.content[2:]
    assert (one.name, one.input, two.input) == ("weather", {"place": "Oslo"}, {})
    assert one.id.startswith("toolu_") and one.id != two.id
    results = [
        {
            "type": "tool_result",
            "tool_use_id": one.id,
            "content": [{"type": "text", "text": "sun"}],
        },
        {"type": "tool_result", "tool_use_id": two.id, "content": "rain", "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [
        USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    answer = await ask(client, stack, "Good.", tools=[TOOL], messages=turns, system="Be brief.")
    assert answer.content[0].text == "Good."
    assert prompts[-1].endswith(
        "system:Be brief.user:hiassistant:Look:<tool_call>weather place=Oslo</tool_call>"
        f"<tool_call>weather</tool_call>tool:sun({one.id})tool:Error: rain({two.id})"
        "user:and?assistant:"
    )


async def test_the_fields_that_claude_code_sends(client, stack):
    prompts = capture_prompts(stack)
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = await ask(
        client,
        stack,
        THOUGHT,
        system=[{"type": "text", "text": "Be brief.", **cached}],
        messages=[USER, {"role": "system", "content": "Be kind."}],
        tools=[{**TOOL, **cached}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        },
        extra_query={"beta": "true"},
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )
    assert shape(answer) == ["thinking", "text"]
    assert prompts[-1].endswith("system:Be brief.user:hisystem:Be kind.assistant:")


@pytest.mark.parametrize(
    ("choice", "most"),
    [
        ({"type": "any"}, None),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "weather"}, 1),
    ],
)
async def test_forced_calls_constrain_the_sampler(client, stack, choice, most):
    answer = await ask(client, stack, FORCED, tools=[TOOL], tool_choice=choice)
    assert {part.type for part in answer.content} == {"tool_use"}
    schema = json.loads(stack.fleet.specs[-1].sampling.constraint.text)
    assert schema.get("maxItems") == most


async def test_only_the_first_call_without_parallel_use_and_none_with_the_choice_none(
    client, stack
):
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert shape(await ask(client, stack, TWO, tools=[TOOL], tool_choice=one)) == [
        "text",
        "tool_use",
    ]
    answer = await ask(client, stack, CALL, tools=[TOOL], tool_choice={"type": "none"})
    assert (answer.content[0].text, answer.stop_reason) == (CALL, "end_turn")


async def test_a_call_that_is_cut_off_has_the_arguments_that_are_whole(client, stack):
    stack.fleet.script.finish = "length"
    cut = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo", "day": "Mo'
    answer = await ask(client, stack, cut, tools=[TOOL])
    assert (answer.content[0].input, answer.stop_reason) == ({"place": "Oslo"}, "max_tokens")


async def test_a_stop_sequence_is_named(client, stack):
    answer = await ask(client, stack, "Hello there", stop_sequences=["xx", " th"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " th")
    assert answer.content[0].text == "Hello"


async def test_structured_output(client, stack):
    class Mill(BaseModel):
        a: int

    stack.fleet.script.reply = '{"a": 1}'
    answer = await client.messages.parse(**BODY, output_format=Mill)
    assert answer.parsed_output == Mill(a=1)
    assert stack.fleet.specs[-1].sampling.constraint.kind == "json_schema"


async def test_a_last_message_of_the_assistant_is_continued(client, stack):
    prompts = capture_prompts(stack)
    turns = [USER, {"role": "assistant", "content": "The answer is"}]
    await ask(client, stack, " 7", messages=turns)
    assert prompts[-1].endswith("user:hiassistant:The answer is")


async def test_an_error_in_the_middle_is_an_event(client, stack):
    stack.fleet.script.hold = asyncio.Event()
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for event in await client.messages.create(**BODY, stream=True):
            if event.type == "message_start":
                stack.fleet.fail(stack.fleet.specs[-1], "decode died")
    stack.fleet.script.hold.set()
    assert caught.value.type == "api_error" and "decode died" in caught.value.message


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_errors_name_the_field(stack, path, fields, field):
    body = BODY | fields
    if path == COUNT:
        del body["max_tokens"]
    await refused(stack, path, body, field)


BLOCKS = [
    ("user", {"type": "image", "source": {}}, ".type"),
    ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, ".type"),
    ("user", {"type": "tool_result", "tool_use_id": "a"}, ".tool_use_id"),
    ("user", {"type": "text", "text": "a", "source": 1}, ".source"),
    ("user", {"type": "text"}, ".text"),
    ("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": []}, ".input"),
    ("assistant", {"type": "tool_result", "tool_use_id": "a"}, ".type"),
    ("system", {"type": "thinking", "thinking": "a", "signature": ""}, ".type"),
]


@pytest.mark.parametrize(("role", "given", "field"), BLOCKS)
async def test_errors_name_the_field_of_a_block(stack, role, given, field):
    body = BODY | {"messages": [USER, {"role": role, "content": [given]}, USER]}
    await refused(stack, MESSAGES, body, f"messages[1].content[0]{field}")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2048}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop"),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "thinking.budget_tokens"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"inference_geo": "eu"}, "inference_geo"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}},
            "output_config.format.schema",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages[1].content",
        ),
    ],
)
async def test_errors_of_messages_name_the_field(stack, fields, field):
    await refused(stack, MESSAGES, BODY | fields, field)


async def refused(stack, path, body, field):
    reply = await stack.http.post(path, json=body)
    document = reply.json()
    assert (reply.status_code, document["type"]) == (400, "error"), reply.text
    assert document["error"]["type"] == "invalid_request_error"
    assert f"'{field}'" in document["error"]["message"]
    assert not stack.fleet.specs


async def test_only_streams_can_be_resumed(stack):
    headers = {"x-millrace-resumable": "1"}
    reply = await stack.http.post(MESSAGES, json=BODY, headers=headers)
    assert reply.status_code == 400 and "'stream': must be true" in reply.json()["error"]["message"]


async def test_the_client_reads_a_resumable_stream(client, stack):
    events = []
    headers = {"x-millrace-resumable": "1"}
    async with client.messages.stream(**BODY, extra_headers=headers) as stream:
        events = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert message.content[0].text == "Hello there"
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    raw = await stack.http.post(MESSAGES, json=BODY | {"stream": True}, headers=headers)
    assert raw.text.startswith("id: 1-") and "\nevent: message_start\n" in raw.text


async def test_a_chosen_id_finds_the_request(stack):
    await stack.http.post(MESSAGES, json=BODY, headers={"x-millrace-request-id": "mine"})
    found = (await stack.http.get("/v1/requests/mine")).json()
    assert found["id"] == stack.fleet.specs[-1].request_id


async def test_a_silent_stream_has_pings(tmp_path):
    async with serving(tmp_path / "m", "proxy.keepalive_s=0.02") as stack:
        hold = stack.fleet.script.hold = asyncio.Event()
        stack.fleet.script.hold_after = 0
        async with stack.http.stream("POST", MESSAGES, json=BODY | {"stream": True}) as reply:
            names = []
            async for line in reply.aiter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
                    hold.set()
        kinds = list(dict.fromkeys(names))
        assert kinds[:2] == ["ping", "message_start"] and names[-1] == "message_stop"


async def test_a_model_without_reasoning_keeps_any_budget(tmp_path):
    template = TEMPLATE.replace("<think>", "")
    async with serving(tmp_path / "m", template=template) as stack, client_of(stack) as client:
        thinking = {"type": "enabled", "budget_tokens": 20}
        assert shape(await ask(client, stack, "Yes.", thinking=thinking)) == ["text"]
        assert stack.fleet.specs[-1].sampling.reasoning is None


async def test_refusals_have_anthropics_types(tmp_path):
    config = config_with(
        tmp_path / "settings", TABLES, "auth.require_key=on", "proxy.max_body_bytes=2000"
    )
    async with serving(tmp_path / "m", config=config) as stack, client_of(stack, "sk-acme") as own:
        assert (await ask(own, stack, "Hi")).content[0].text == "Hi"
        assert stack.fleet.specs[-1].tenant == "acme"
        with pytest.raises(anthropic.RateLimitError) as limited:
            await ask(own, stack, "Hi")
        assert limited.value.type == "rate_limit_error"
        assert int(limited.value.response.headers["retry-after"]) > 0
        for key, fields, kind in (
            ("sk-guess", {}, "authentication_error"),
            ("sk-narrow", {}, "permission_error"),
            ("sk-acme", {"model": "other"}, "not_found_error"),
            ("sk-acme", {"system": "a" * 2000}, "request_too_large"),
        ):
            with pytest.raises(anthropic.APIStatusError) as caught:
                await ask(own.with_options(api_key=key), stack, "Hi", **fields)
            assert caught.value.type == kind
            assert caught.value.request_id.startswith("req_")
        headers = {"x-api-key": "sk-acme"}
        for path, status in ((MESSAGES, 405), (f"{MESSAGES}/batches", 404)):
            reply = await stack.http.get(path, headers=headers)
            assert (reply.status_code, reply.json()["type"]) == (status, "error")
        text = (await stack.http.get("/metrics")).text
        name = "millrace_proxy_http_requests_total"
        assert total(text, name, route=MESSAGES, code="200") == 1
        assert total(text, name, route=MESSAGES, code="401") == 1


async def test_an_overloaded_server_says_so(client, stack):
    stack.fleet.script.on_submit = lambda spec: stack.fleet.refuse(spec, "overloaded", "full", 2.0)
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(**BODY)
    assert caught.value.type == "overloaded_error"
    assert caught.value.response.headers["retry-after"] == "2"
