"""The field prompt_logprobs of both completion endpoints, in vLLM's form."""

from __future__ import annotations

import pytest

from support.gateway import MODEL, gateway

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


def checked(found: list, tokens: int, most: int) -> None:
    """The scripted instance says that token i is at position i, and 10 and more are likeliest."""
    assert len(found) == tokens and found[0] is None
    for position, shown in enumerate(found[1:], 1):
        assert list(shown) == [str(position), *(str(10 + rank) for rank in range(most))]
        assert shown[str(position)].keys() == {"logprob", "rank", "decoded_token"}
        assert (shown[str(position)]["logprob"], shown[str(position)]["rank"]) == (-0.5, None)
        for rank in range(most):
            one = shown[str(10 + rank)]
            assert (one["logprob"], one["rank"]) == (-1.0 - rank, rank + 1)
            assert isinstance(one["decoded_token"], str) and one["decoded_token"]


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("new", [0, 16])
async def test_of_a_chat(stack, most, new):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": new, "prompt_logprobs": most}
    response = await stack.http.post("/v1/chat/completions", json=body)
    document = response.json()
    assert response.status_code == 200, document
    [spec] = stack.fleet.specs
    assert (spec.sampling.prompt_logprobs, spec.sampling.max_tokens) == (most, new)
    assert (spec.prefix_hashes, spec.pooling) == ((), "")
    checked(document["prompt_logprobs"], spec.prompt_tokens, most)
    [choice] = document["choices"]
    assert choice["message"]["content"] == ("Hello there" if new else "")
    assert choice["finish_reason"] == ("stop" if new else "length")
    assert (document["usage"]["completion_tokens"] == 0) is (new == 0)


async def test_of_every_prompt_of_a_completion(stack):
    body = {"model": MODEL, "prompt": ["hi", "ho ho"], "prompt_logprobs": 1, "n": 2}
    document = (await stack.http.post("/v1/completions", json=body)).json()
    lengths = [spec.prompt_tokens for spec in stack.fleet.specs for _ in range(2)]
    for choice, tokens in zip(document["choices"], lengths, strict=True):
        checked(choice["prompt_logprobs"], tokens, 1)
    assert "prompt_logprobs" not in document


async def test_the_openai_client_passes_it_on(stack):
    answer = await stack.client.completions.create(
        model=MODEL, prompt="hi", extra_body={"prompt_logprobs": 1}
    )
    checked(answer.choices[0].prompt_logprobs, 3, 1)


async def test_an_echo_shows_as_many_as_its_own_field_says(stack):
    body = {"model": MODEL, "prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0}
    body["prompt_logprobs"] = 3
    [choice] = (await stack.http.post("/v1/completions", json=body)).json()["choices"]
    assert stack.fleet.specs[0].sampling.prompt_logprobs == 3
    checked(choice["prompt_logprobs"], 3, 3)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2, 2]  # and its own


async def test_without_the_field_nothing_is_shown(stack):
    body = {"model": MODEL, "messages": MESSAGES}
    document = (await stack.http.post("/v1/chat/completions", json=body)).json()
    assert "prompt_logprobs" not in document
    assert stack.fleet.specs[0].sampling.prompt_logprobs == -1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi", "prompt_logprobs": 1, "stream": True}),
        ("/v1/completions", {"prompt": "hi", "prompt_logprobs": -1}),
        ("/v1/completions", {"prompt": "hi", "prompt_logprobs": 21}),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 0, "stream": True}),
    ],
)
async def test_what_is_refused(stack, path, fields):
    response = await stack.http.post(path, json={"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
