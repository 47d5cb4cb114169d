"""/v1/chat/completions with the unmodified openai client, sync and async, and over plain HTTP."""

from __future__ import annotations

import asyncio

import openai
import orjson
import pytest

from millrace.core.span import Span
from millrace.event_lines import event_lines
from millrace.proxy.request.options import Limits
from millrace.proxy.request.validation import Bodies
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def events(stack, **fields):
    """Returns the JSON of a stream's events; the last item is the text after the last "data:"."""
    found = []
    body = {"model": MODEL, "messages": USER, "stream": True, **fields}
    async with stack.http.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in event_lines(response):
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
    return [*(orjson.loads(text) for text in found[:-1]), found[-1]]


async def test_answer(stack):
    answer = await stack.client.chat.completions.create(model=MODEL, messages=USER)
    [choice] = answer.choices
    assert choice.message.content == "Hello there"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    [spec] = stack.fleet.specs
    assert answer.id == spec.request_id
    assert answer.usage.prompt_tokens == spec.prompt_tokens
    assert answer.usage.total_tokens == spec.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_prompt_is_the_rendered_template(stack):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    stored = {}

    def keep(spec):
        stored["ids"] = asyncio.ensure_future(stack.proxy.store.prompt_ids(spec.request_id))
        stack.fleet.place(spec)
        stack.fleet.play_later(spec)

    stack.fleet.script.on_submit = keep
    await stack.client.chat.completions.create(model=MODEL, messages=messages)
    text = stack.fleet.tokenizer.decode((await stored["ids"]).tolist(), skip_special_tokens=False)
    assert text == "<|bos|><|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|>"


def test_templates_see_tool_calls_as_they_were_sent_but_without_nulls():
    function = {"arguments": "{}", "name": "f"}
    call = {"type": "function", "function": function, "id": "c"}
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": None}]},
        {"role": "tool", "content": parts, "name": None, "tool_call_id": "c"},
    ]
    limits = Limits(model=MODEL, vocab_size=9, context_tokens=9, eos_token_ids=())
    body = orjson.dumps({"model": MODEL, "messages": messages})
    first, second = Bodies(limits).read_chat(body).conversation.messages
    assert first == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert list(first["tool_calls"][0]) == list(call)
    assert list(first["tool_calls"][0]["function"]) == list(function)
    assert second == {"role": "tool", "content": "a\nb", "tool_call_id": "c"}


async def test_stream(stack):
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello there"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_ends_with_done_and_has_no_usage_unasked(stack):
    *chunks, done = await events(stack)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


async def test_sync_client(stack):
    def talk() -> tuple[str, str]:
        with openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key="x", max_retries=0, timeout=HANG_S
        ) as client:
            whole = client.chat.completions.create(model=MODEL, messages=USER)
            stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="other", messages=USER)
            with pytest.raises(openai.BadRequestError) as raised:
                client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
            assert raised.value.param == "temperature"
            return whole.choices[0].message.content or "", text

    assert await asyncio.to_thread(talk) == ("Hello there", "Hello there")


async def test_sampling_reaches_the_engine(stack):
    await stack.client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -5},
        seed=-1,
        n=2,
        logprobs=True,
        top_logprobs=3,
        user="someone",
        metadata={"a": "b"},
        store=True,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        extra_body={
            "top_k": 40,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [9, 9],
        },
    )
    sampling = stack.fleet.specs[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (9, 2, 2)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 40, 0.25)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.repetition_penalty == 1.5
    assert dict(sampling.logit_bias) == {7: -5}
    assert sampling.seed == 2**64 - 1
    assert list(sampling.stop_token_ids) == [9, 1]
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, -1)


async def test_defaults(stack):
    await stack.client.chat.completions.create(model=MODEL, messages=USER)
    await stack.client.chat.completions.create(
        model=MODEL, messages=USER, extra_body={"ignore_eos": True, "top_k": -1}
    )
    first, second = (spec.sampling for spec in stack.fleet.specs)
    assert first.max_tokens == 2048 - stack.fleet.specs[0].prompt_tokens
    assert (first.temperature, first.top_p, first.n, first.logprobs) == (1, 1, 1, -1)
    assert list(first.stop_token_ids) == [1]
    assert list(second.stop_token_ids) == []
    assert second.top_k == 0
    assert first.seed != second.seed


async def test_choices_are_told_apart(stack):
    answer = await stack.client.chat.completions.create(model=MODEL, messages=USER, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [
        (i, "Hello there") for i in range(3)
    ]
    *chunks, _ = await events(stack, n=2)
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in own) == "Hello there"
        assert [c["finish_reason"] for c in own][-1] == "stop"


async def test_logprobs(stack):
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "Hello there"
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"Hello there"
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
    *chunks, _ = await events(stack, logprobs=True)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(entry["token"] for entry in streamed) == "Hello there"
    assert streamed[0]["top_logprobs"] == []


async def test_characters_are_never_split(stack):
    text = "Zürich 東京 😀😀 naïve"
    stack.fleet.script = Script(reply=text)
    *chunks, _ = await events(stack)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, {"logprobs": True}])
async def test_stop_string_across_tokens(stack, stream, extra):
    stack.fleet.script = Script(reply="one two<STOP> three " + "four " * 50, finish="length")
    body = {"stop": ["<STOP>", "never"], **extra}
    if stream:
        *chunks, _ = await events(stack, **body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        entries = [e for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
        last = choices[-1]
    else:
        body |= {"model": MODEL, "messages": USER}
        last = (await stack.http.post(CHAT, json=body)).json()["choices"][0]
        text, entries = last["message"]["content"], (last["logprobs"] or {"content": []})["content"]
    assert (text, last["finish_reason"], last["stop_reason"]) == ("one two", "stop", "<STOP>")
    assert "".join(entry["token"] for entry in entries) == ("one two" if extra else "")
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    assert [(c.request_id, c.reason) for c in stack.fleet.cancels] == [
        (stack.fleet.specs[0].request_id, "stop")
    ]


async def test_stop_string_in_output_and_after_min_tokens(stack):
    stack.fleet.script = Script(reply="a.b.c", finish="length")
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=USER, stop=".", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].message.content == "a."
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=USER, stop=".", extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].message.content == "a.b"


async def test_held_text_comes_out_at_the_end(stack):
    stack.fleet.script = Script(reply="ends with <ST", finish="length")
    answer = await stack.client.chat.completions.create(model=MODEL, messages=USER, stop="<STOP>")
    assert answer.choices[0].message.content == "ends with <ST"
    assert answer.choices[0].finish_reason == "length"


async def test_special_tokens_are_shown_when_asked_for(stack):
    stack.fleet.script = Script(token_ids=[2, 10, 1], finish="length")
    answers = [
        await stack.client.chat.completions.create(
            model=MODEL, messages=USER, extra_body={"skip_special_tokens": skip}
        )
        for skip in (True, False)
    ]
    plain = stack.fleet.tokenizer.decode([10])
    assert [a.choices[0].message.content for a in answers] == [plain, f"<|user|>{plain}<|end|>"]


async def test_token_ids_are_returned_when_asked_for(stack):
    body = {"model": MODEL, "messages": USER, "return_token_ids": True}
    ids = stack.fleet.tokenizer.encode("Hello there", add_special_tokens=False).ids
    whole = (await stack.http.post(CHAT, json=body)).json()
    assert whole["choices"][0]["token_ids"] == [*ids, 1]
    *chunks, _ = await events(stack, return_token_ids=True)
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == [*ids, 1]


async def test_trace_explains_the_ttft(stack):
    span = Span(
        name="chunk", instance_id="prefill-0", start_s=0.1, end_s=0.2, attributes={"tokens": "4"}
    )
    stack.fleet.script = Script(spans=[span])
    body = {"model": MODEL, "messages": USER}
    headers = {"x-millrace-trace": "1"}
    whole = (await stack.http.post(CHAT, json=body, headers=headers)).json()["millrace"]
    own = ["tokenise", "record", "place", "answer"]
    assert [bar["name"] for bar in whole["spans"]] == [*own, "chunk"]
    assert whole["spans"][-1]["attributes"] == {"tokens": "4"}
    assert whole["ttft_ms"] > 0
    assert whole["predicted_ttft_ms"] >= 1.0  # and what it took until it was placed
    response = await stack.http.post(CHAT, json={**body, "stream": True}, headers=headers)
    last = orjson.loads(response.text.strip().split("data: ")[-2])
    assert [bar["name"] for bar in last["millrace"]["spans"]] == [*own, "chunk"]
    assert "millrace" not in (await stack.http.post(CHAT, json=body)).json()


async def test_objectives_and_trace_context_reach_the_scheduler(stack):
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {
        "x-millrace-ttft-slo-ms": "250",
        "x-millrace-tbt-slo-ms": "12.5",
        "traceparent": context,
    }
    await stack.client.chat.completions.create(model=MODEL, messages=USER, extra_headers=headers)
    [spec] = stack.fleet.specs
    assert (spec.slo.ttft_s, spec.slo.tbt_s, spec.slo.class_name) == (0.25, 0.0125, "default")
    assert spec.traceparent == context
    bad = {"traceparent": "00-zz"}
    await stack.client.chat.completions.create(model=MODEL, messages=USER, extra_headers=bad)
    assert stack.fleet.specs[1].traceparent == ""


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_continuous_usage_is_in_every_chunk_and_counts_its_own_choice(stack, path):
    body = {"prompt": "hi"} if path != CHAT else {"messages": USER}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"model": MODEL, "stream": True, "stream_options": options, "n": 2}
    response = await stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    chunks = [
        orjson.loads(line.removeprefix("data: "))
        for line in response.text.split("\n\n")
        if line.startswith("data: {")
    ]
    [spec] = stack.fleet.specs
    *said, total = chunks
    for index in (0, 1):
        counts = [
            c["usage"]["completion_tokens"] for c in said if c["choices"][0]["index"] == index
        ]
        # One token per chunk, the last token the end of sequence; a chat's first chunk is its role.
        assert counts == list(range(0 if path == CHAT else 1, 9))
    for chunk in said:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == spec.prompt_tokens
        assert usage["total_tokens"] == spec.prompt_tokens + usage["completion_tokens"]
    assert (total["choices"], total["usage"]["completion_tokens"]) == ([], 16)


async def test_continuous_usage_without_include_usage_shows_none(stack):
    chunks = await events(stack, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in chunks[:-1])
