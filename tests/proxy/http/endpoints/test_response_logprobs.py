"""Log probabilities in /v1/responses, with the unmodified openai client."""

from __future__ import annotations

import pytest

from support.gateway import MODEL, gateway
from support.tool_model import TWO, WEATHER, serving

INCLUDE = ["message.output_text.logprobs"]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def ask(stack, **fields):
    return await stack.client.responses.create(**{"model": MODEL, "input": "hi", **fields})


def text_of(entries):
    return "".join(entry.token for entry in entries)


async def test_an_answer_shows_its_tokens(stack):
    answer = await ask(stack, include=INCLUDE, top_logprobs=2)
    [part] = answer.output[0].content
    assert text_of(part.logprobs) == part.text == "Hello there"
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs) == b"Hello there"
    assert {entry.logprob for entry in part.logprobs} == {-0.5}
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    assert answer.top_logprobs == 2
    assert await stack.client.responses.retrieve(answer.id) == answer


async def test_a_stream_shows_them_with_their_text(stack):
    events = [event async for event in await ask(stack, include=INCLUDE, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(text_of(event.logprobs) == event.delta for event in deltas)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert text_of(done.logprobs) == "Hello there"
    [part] = events[-1].response.output[0].content
    assert text_of(part.logprobs) == "Hello there"
    assert part.logprobs[0].top_logprobs == []


async def test_they_are_shown_on_demand_only(stack):
    others = ["reasoning.encrypted_content", "file_search_call.results"]
    nulls = {"include": None, "top_logprobs": None}
    for fields in ({"top_logprobs": 3}, {"include": []}, {"include": others}, nulls):
        answer = await ask(stack, **fields)
        assert answer.output[0].content[0].logprobs == []
        assert stack.fleet.specs[-1].sampling.logprobs == -1


async def test_unknown_values_are_refused(stack):
    for fields, param in (
        ({"include": ["everything"]}, "include[0]"),
        ({"include": INCLUDE, "top_logprobs": 1000}, "top_logprobs"),
    ):
        body = {"model": MODEL, "input": "hi", **fields}
        reply = await stack.http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_message_before_calls_has_no_tokens_of_the_calls(tmp_path):
    async with serving(tmp_path / "model") as stack:
        stack.fleet.script.reply = TWO
        answer = await ask(stack, include=INCLUDE, tools=[{"type": "function", **WEATHER}])
    message, *calls = answer.output
    assert text_of(message.content[0].logprobs) == message.content[0].text == "Look:"
    assert [call.type for call in calls] == ["function_call"] * 2
