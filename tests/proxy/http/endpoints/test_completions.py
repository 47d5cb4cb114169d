"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import orjson
import pytest

from support.gateway import MODEL, Script, gateway


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def test_text_prompt(stack):
    answer = await stack.client.completions.create(model=MODEL, prompt="hi", max_tokens=30)
    assert answer.choices[0].text == "Hello there"
    assert answer.object == "text_completion"
    assert stack.fleet.specs[0].prompt_tokens == 3  # <|bos|> h i


async def test_token_ids_go_as_they_are(stack):
    ids = [7, 8, 9]
    await stack.client.completions.create(model=MODEL, prompt=ids)
    assert stack.fleet.specs[0].prompt_tokens == 3


async def test_whole_numbers_with_a_point_are_integers(stack):
    body = {"model": MODEL, "prompt": [7.0, 8, 9], "max_tokens": 5.0}
    response = await stack.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [spec] = stack.fleet.specs
    assert (spec.prompt_tokens, spec.sampling.max_tokens) == (3, 5)


async def test_without_special_tokens(stack):
    await stack.client.completions.create(
        model=MODEL, prompt="hi", extra_body={"add_special_tokens": False}
    )
    assert stack.fleet.specs[0].prompt_tokens == 2


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[7], [8, 9], [10]]])
async def test_several_prompts(stack, prompts):
    answer = await stack.client.completions.create(model=MODEL, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert {choice.text for choice in answer.choices} == {"Hello there"}
    assert len({spec.request_id for spec in stack.fleet.specs}) == 3
    assert answer.usage.prompt_tokens == sum(s.prompt_tokens for s in stack.fleet.specs)
    assert answer.usage.completion_tokens == 6 * 8


async def test_several_prompts_stream(stack):
    stream = await stack.client.completions.create(
        model=MODEL, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Hello there", 1: "Hello there"}
    assert chunks[-1].usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(stack, stream):
    answer = await stack.client.completions.create(
        model=MODEL, prompt="Once, ", echo=True, stream=stream
    )
    if stream:
        text = "".join([chunk.choices[0].text async for chunk in answer])
    else:
        text = answer.choices[0].text
    assert text == "Once, Hello there"


async def test_echo_of_token_ids(stack):
    ids = stack.fleet.tokenizer.encode("mill race", add_special_tokens=False).ids
    answer = await stack.client.completions.create(model=MODEL, prompt=ids, echo=True)
    assert answer.choices[0].text == "mill raceHello there"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(stack, stream):
    stack.fleet.script = Script(reply="AB", finish="length")
    answer = await stack.client.completions.create(
        model=MODEL, prompt="hé", echo=True, logprobs=2, stream=stream
    )
    assert stack.fleet.specs[0].sampling.prompt_logprobs == 2
    if stream:
        found = [c.choices[0] async for c in answer]
        text = "".join(choice.text for choice in found)
        parts = [choice.logprobs for choice in found if choice.logprobs is not None]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        offsets = [offset for part in parts for offset in part.text_offset]
    else:
        text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
        tokens, values, offsets = logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset
        assert logprobs.top_logprobs[0] is None
        assert len(logprobs.top_logprobs[1]) == 3  # the likeliest two and the chosen one
    assert text == "héAB"
    assert tokens[0] == "<|bos|>"
    assert tokens[-2:] == ["A", "B"]
    assert values[0] is None
    assert all(value == -0.5 for value in values[1:])
    assert offsets[:2] == [0, 0]
    assert offsets[-2:] == [2, 3]
    assert offsets == sorted(offsets)


async def test_logprobs_without_alternatives(stack):
    answer = await stack.client.completions.create(model=MODEL, prompt="hi", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == "Hello there"
    assert logprobs.top_logprobs is None
    assert stack.fleet.specs[0].sampling.prompt_logprobs == -1


async def test_best_of_n(stack):
    await stack.client.completions.create(model=MODEL, prompt="hi", n=2, best_of=2)
    assert stack.fleet.specs[0].sampling.n == 2


async def test_tokenize_and_back(stack):
    found = (await stack.http.post("/tokenize", json={"prompt": "Zürich 😀"})).json()
    assert found["count"] == len(found["tokens"])
    assert found["tokens"][0] == 0
    assert found["max_model_len"] == 2048
    body = {"tokens": found["tokens"], "skip_special_tokens": True}
    assert (await stack.http.post("/detokenize", json=body)).json() == {"prompt": "Zürich 😀"}
    body = {"tokens": found["tokens"][:1]}
    assert (await stack.http.post("/detokenize", json=body)).json() == {"prompt": "<|bos|>"}
    body = {"prompt": "hi", "add_special_tokens": False, "model": MODEL}
    assert (await stack.http.post("/tokenize", json=body)).json()["count"] == 2


async def test_tokenize_messages(stack):
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    ids = (await stack.http.post("/tokenize", json=body)).json()["tokens"]
    text = stack.fleet.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|bos|><|user|>hi<|end|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_no_token_with_echo_scores_the_prompt(stack, stream, logprobs):
    body = {"model": MODEL, "prompt": ["hi", "ho ho"], "max_tokens": 0, "echo": True, "n": 2}
    body |= {"logprobs": logprobs, "return_token_ids": True, "stop": "h", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    response = await stack.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if stream:
        chunks = [
            orjson.loads(line.removeprefix("data: "))
            for line in response.text.split("\n\n")
            if line.startswith("data: {")
        ]
        assert all(chunk["usage"]["completion_tokens"] == 0 for chunk in chunks)
        usage = chunks[-1]["usage"]
        choices = [
            [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
            for index in range(4)
        ]
    else:
        document = response.json()
        usage = document["usage"]
        choices = [[choice] for choice in document["choices"]]
    assert [spec.sampling.max_tokens for spec in stack.fleet.specs] == [0, 0]
    pooling = "last" if logprobs is None else ""
    assert [spec.pooling for spec in stack.fleet.specs] == [pooling] * 2
    lengths = [spec.prompt_tokens for spec in stack.fleet.specs]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(lengths), 0)
    for pieces, text, tokens in zip(
        choices, ["hi", "hi", "ho ho", "ho ho"], [lengths[0]] * 2 + [lengths[1]] * 2, strict=True
    ):
        assert "".join(piece["text"] for piece in pieces) == text
        assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == ("length", None)
        assert [i for piece in pieces for i in piece.get("token_ids", ())] == []
        if logprobs is None:
            assert pieces[0]["logprobs"] is None
            continue
        found = pieces[0]["logprobs"]
        assert found["token_logprobs"] == [None, *[-0.5] * (tokens - 1)]
        assert len(found["tokens"]) == len(found["text_offset"]) == tokens
        assert all(not (piece["logprobs"] or {"tokens": []})["tokens"] for piece in pieces[1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_token_without_echo_is_refused(stack, path):
    asked = (
        {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": ""}]}
    )
    body = {"model": MODEL, "max_tokens": 0, **asked}
    response = await stack.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    body = {"model": MODEL, "max_tokens": 0, "min_tokens": 1, "echo": True, "prompt": "hi"}
    response = await stack.http.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == "min_tokens"
