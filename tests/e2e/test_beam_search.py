"""Beam search through a whole stack, against transformers'."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.deadlines import HANG_S
from support.live_stack import live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

WIDTH, TOKENS = 4, 12


async def searched(client: httpx.AsyncClient, ids: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": ids, "n": WIDTH, "max_tokens": TOKENS, "use_beam_search": True, **fields}
    body |= {"model": "tiny", "return_token_ids": True, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def test_it_finds_the_answers_of_transformers() -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 90, 700))]
    expected = [oracle("llama").beams(ids, WIDTH, TOKENS) for ids in prompts]
    settings = ["engine.dtype=float32", "engine.max_chunk_tokens=256"]
    async with (
        live_stack(served_folder("llama"), settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = [await searched(client, ids) for ids in prompts]
        together = await asyncio.gather(*(searched(client, ids) for ids in prompts))
        scored = await searched(client, prompts[1], logprobs=1)
    assert [ids_of(answer) for answer in alone] == expected
    assert [ids_of(answer) for answer in together] == expected
    assert alone[2]["usage"]["prompt_tokens"] == 700
    assert alone[2]["usage"]["completion_tokens"] == WIDTH * TOKENS
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in scored["choices"]]
    assert sums == sorted(sums, reverse=True)
    assert sums == pytest.approx(
        [oracle("llama").logprob(prompts[1], ids) for ids in expected[1]], abs=1e-3
    )
