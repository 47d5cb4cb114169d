"""Structured output through the whole stack: valid, streamed, with several choices, and moved."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from millrace.shipped import SHIPPED_MODEL
from millrace.wire.clients.scheduler_client import evict, set_cordon
from support.deadlines import HANG_S
from support.live_stack import complete, held, live_stack

FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 400}
LINES = r"([a-z]{1,9}\n){600}"
MOVED = {
    "prompt": "Words:",
    "guided_regex": LINES,
    "max_tokens": 450,
    "temperature": 1.2,
}


async def test_answers_follow_their_schema_and_survive_a_move() -> None:
    async with (
        live_stack(SHIPPED_MODEL, prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        await choices_follow_a_schema(client)
        await a_stream_equals_the_whole_answer(client)
        await a_cut_answer_says_so(client)
        expected = []
        for seed in (3, 4):
            whole = await complete(client, **MOVED, seed=seed)
            expected.append(whole["choices"][0]["text"])
            assert re.match(r"([a-z]{1,9}\n){20}", expected[-1])
        for _ in range(5):  # on a busy machine answers may end before they are moved
            found = await answers_that_move(stack, client)
            assert [one["text"] for one in found] == expected
            if any(one["moves"] for one in found):
                break
        else:
            pytest.fail("no answer was moved")


async def answers_that_move(stack: Stack, client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Two answers; the instance that holds most is evicted after some lines of each."""
    scheduler = f"127.0.0.1:{stack.services['scheduler'].port}"
    found: list[dict[str, Any]] = [{"seed": seed, "text": "", "moves": 0} for seed in (3, 4)]
    reading = [asyncio.create_task(read_stream(client, one)) for one in found]
    async with held(stack, lambda: all(one["text"].count("\n") > 5 for one in found)) as name:
        await evict(scheduler, name, abort=False)
    await asyncio.gather(*reading)
    await set_cordon(scheduler, name, False)
    return found


async def read_stream(client: httpx.AsyncClient, found: dict[str, Any]) -> None:
    body = {"model": "tiny", "stream": True, **MOVED, "seed": found["seed"]}
    headers = {"x-millrace-trace": "1"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for line in event_lines(response):
            if line.startswith("data: {"):
                chunk = orjson.loads(line[6:])
                assert "error" not in chunk, chunk
                found["text"] += "".join(choice["text"] for choice in chunk["choices"])
                spans = chunk.get("millrace", {}).get("spans", ())
                found["moves"] += sum(span["name"] == "moved" for span in spans)


async def choices_follow_a_schema(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "response_format": FORMAT, "n": 4, "seed": 5, "temperature": 1.5}
    body |= {"logprobs": True, "top_logprobs": 2}
    answers = [(await client.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
    texts = [[choice["message"]["content"] for choice in a["choices"]] for a in answers]
    assert texts[0] == texts[1]  # of one seed
    assert len(set(texts[0])) > 1
    for choice, text in zip(answers[0]["choices"], texts[0], strict=True):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)


async def a_stream_equals_the_whole_answer(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "response_format": FORMAT, "seed": 6}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    text = ""
    async with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True}
    ) as response:
        async for line in event_lines(response):
            if line.startswith("data: {"):
                for choice in orjson.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert text == whole["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)


async def a_cut_answer_says_so(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="x", response_format=FORMAT, max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    chosen = await complete(client, prompt="x", guided_choice=["yes", "no"], min_tokens=30)
    assert chosen["choices"][0]["text"] in ("yes", "no")
    assert chosen["choices"][0]["finish_reason"] == "stop"
