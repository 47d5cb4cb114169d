"""A prompt that begins like an earlier one is computed in part, against real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import complete, eventually, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "llama"
ANSWER = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    settings = [
        *("engine.dtype=float32", "engine.max_chunk_tokens=256", "engine.kv_bytes=4194304"),
        # No heartbeat comes in time: blocks are reported as soon as requests leave them.
        *("scheduler.heartbeat_s=20", "scheduler.lease_s=60"),
    ]
    async with live_stack(served_folder(MODEL), prefill=1, settings=settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as opened:
        yield opened


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a traced answer."""
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **body}
    trace = {"x-millrace-trace": "1"}
    async with client.stream("POST", "/v1/completions", json=body, headers=trace) as response:
        assert response.status_code == 200
        lines = [line async for line in event_lines(response)]
    return [orjson.loads(line[6:]) for line in lines if line[:7] == "data: {"]


async def test_the_second_time_only_the_tail_is_computed(client: httpx.AsyncClient) -> None:
    ids = prompt(700)
    first = await complete(client, prompt=ids, **ANSWER)
    chunks = await streamed(client, prompt=ids, **ANSWER)
    last = chunks[-1]

    expected = oracle(MODEL).greedy(ids, 12)
    again = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids", ())]
    assert token_ids(first) == again == expected
    assert (cached(first), cached(last)) == (0, 640)
    passes = [s for s in last["millrace"]["spans"] if s["name"].startswith("chunk")]
    assert [(s["attributes"]["history"], s["attributes"]["tokens"]) for s in passes] == [
        ("640", "60")
    ]


async def test_a_conversation_goes_on_behind_what_is_there(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "tell me of rivers " * 12}]
    found = []
    for _ in range(3):
        body = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        found.append((answer["usage"]["prompt_tokens"], cached(answer)))
        content = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "on"}]
    assert found[0][1] == 0
    for (before, _), (_, hit) in pairwise(found):
        assert hit >= before // 64 * 64 > 0


async def test_a_request_may_take_no_part(client: httpx.AsyncClient) -> None:
    ids = prompt(300)
    first = await complete(client, prompt=ids, **ANSWER)
    for body in ({"cache_prompt": False}, {"cache_salt": "other"}, {"echo": True, "logprobs": 0}):
        answer = await complete(client, prompt=ids, **ANSWER, **body)
        assert cached(answer) == 0, body
        assert token_ids(answer)[-12:] == token_ids(first)


@pytest.mark.slow
async def test_many_prompts_push_each_other_out(client: httpx.AsyncClient) -> None:
    """More than the pools hold: whatever is found is right."""
    prompts = [prompt(3000, seed) for seed in range(6)]
    await asyncio.gather(*(complete(client, prompt=p, **ANSWER) for p in prompts))
    for ids in (prompts[-1], prompts[0], prompts[-1]):
        answer = await complete(client, prompt=ids, **ANSWER)
        assert token_ids(answer) == oracle(MODEL).greedy(ids, 12)


@pytest.mark.slow
async def test_an_instance_that_died_has_forgotten_all(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    ids = prompt(500, seed=3)
    first = await complete(client, prompt=ids, **ANSWER)
    for name in ("prefill-0", "decode-0"):
        restarts = stack.services[name].restarts
        process = stack.services[name].process
        assert process is not None
        process.kill()

        async def is_back(name: str = name, restarts: int = restarts) -> bool:
            ready = (await client.get("/ready")).status_code == 200
            return ready and stack.services[name].restarts > restarts

        await eventually(is_back)
        again = await complete(client, prompt=ids, **ANSWER)
        assert token_ids(again) == token_ids(first)
    assert cached(await complete(client, prompt=ids, **ANSWER)) == 448
