"""The blocks that a proxy sends for prompts with a common prefix, and the usage for clients."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import numpy as np
import orjson
import pytest

from millrace.core.config import EngineConfig
from millrace.core.incarnation import Incarnation
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.proxy.request.options import Options, Sampling
from millrace.proxy.text.prefix import MOST_AT_ONCE_TOKENS, PromptHasher, with_blocks
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually

COMPLETIONS = "/v1/completions"
IDS = [5 + i % 50 for i in range(200)]
BODY = {"model": MODEL, "prompt": IDS, "max_tokens": 20}


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


async def spec_of(stack, **body):
    response = await stack.http.post(COMPLETIONS, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return stack.fleet.specs[-1]


def blocks(ids, salt=""):
    return block_hashes(array("i", ids), 64, prefix_root(64, salt))


async def test_every_prompt_comes_with_its_blocks(stack):
    spec = await spec_of(stack)
    assert (spec.prefix_block_tokens, spec.prefix_root) == (64, prefix_root(64))
    assert list(spec.prefix_hashes) == blocks(IDS)
    short = await spec_of(stack, prompt=IDS[:40])
    assert (short.prefix_block_tokens, list(short.prefix_hashes)) == (64, [])
    assert list((await spec_of(stack, echo=True)).prefix_hashes) == blocks(IDS)
    several = await spec_of(stack, prompt=[IDS[:64], IDS[64:]])
    assert list(several.prefix_hashes) == blocks(IDS[64:])


async def test_a_request_may_share_nothing_or_with_few(stack):
    for body in ({"cache_prompt": False}, {"echo": True, "logprobs": 1}):
        spec = await spec_of(stack, **body)
        assert (spec.prefix_block_tokens, spec.prefix_root, list(spec.prefix_hashes)) == (0, 0, [])
    salted = await spec_of(stack, cache_salt="tenant")
    assert list(salted.prefix_hashes) == blocks(IDS, "tenant") != blocks(IDS)
    response = await stack.http.post(COMPLETIONS, json={**BODY, "cache_salt": 3})
    assert response.status_code == 400 and "cache_salt" in response.text


async def test_conversations_share_their_beginning(stack):
    messages = [{"role": "user", "content": "word " * 60}]
    chat = {"model": MODEL, "max_tokens": 5}
    for more in ([], [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]):
        body = {**chat, "messages": messages + more}
        assert (await stack.http.post("/v1/chat/completions", json=body)).status_code == 200
    first, second = (list(spec.prefix_hashes) for spec in stack.fleet.specs)
    assert len(first) > 2
    assert second[: len(first) - 1] == first[:-1]


async def test_usage_shows_what_was_cached_streamed_or_not(stack):
    usage = (await stack.http.post(COMPLETIONS, json=BODY)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    lines = (await stack.http.post(COMPLETIONS, json=body)).text.splitlines()
    last = [orjson.loads(line[6:]) for line in lines if line[:7] == "data: {"][-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_next_incarnation_has_the_blocks_of_what_was_generated(stack):
    hold = asyncio.Event()
    tokens = [60 + i for i in range(30)]
    stack.fleet.script = Script(token_ids=tokens, finish="length", hold=hold, hold_after=20)
    body = {**BODY, "prompt": IDS[:115], "max_tokens": 30}
    asking = asyncio.create_task(stack.http.post(COMPLETIONS, json=body))
    gateway = stack.proxy.gateway
    await eventually(lambda: sum(r.completion_tokens for r in gateway.requests) == 20)
    stack.fleet.script = Script(token_ids=tokens, finish="length")
    stack.fleet.move(stack.fleet.specs[0])
    await asking
    hold.set()
    first, second = stack.fleet.specs
    assert list(first.prefix_hashes) == blocks(IDS[:115])
    assert list(second.prefix_hashes) == blocks(IDS[:115] + tokens[:20])
    assert len(second.prefix_hashes) == 2


async def test_a_cache_that_is_off_is_not_spoken_of(tmp_path):
    async with gateway(tmp_path, "engine.prefix_cache=off") as stack:
        spec = await spec_of(stack)
        assert (spec.prefix_block_tokens, list(spec.prefix_hashes)) == (0, [])


async def test_long_prompts_are_hashed_beside_the_event_loop():
    sampling = Sampling(
        **{"max_tokens": None, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        **{"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "seed": 1},
        **{"frequency_penalty": 0.0, "logit_bias": {}, "stop_token_ids": (), "logprobs": -1},
    )
    hasher = PromptHasher(EngineConfig(page_tokens=16, prefix_block_tokens=50))
    ids = np.arange(MOST_AT_ONCE_TOKENS + 70, dtype=np.int32)
    for count in (100, len(ids)):
        found = await hasher.blocks(ids[:count], Options(sampling=sampling))
        assert found.block_tokens == 64
        assert found.hashes == blocks(ids[:count].tolist())


def test_new_blocks_follow_the_known_blocks():
    alone = RequestSpec(
        request_id="r",
        proxy=Incarnation("x", 1),
        prompt_tokens=40,
        sampling=SamplingParams(max_tokens=1),
    )
    spec = replace(alone, prefix_block_tokens=64, prefix_root=prefix_root(64))
    for end in (40, 64, 100, 200):
        spec = with_blocks(spec, np.array(IDS[:end], dtype=np.int32))
        assert list(spec.prefix_hashes) == blocks(IDS[:end])
    assert with_blocks(alone, np.array(IDS, dtype=np.int32)) == alone
