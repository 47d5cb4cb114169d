"""Every family through the whole disaggregated path, token by token the same as transformers."""

import asyncio

import httpx
import pytest

from support.live_stack import greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

FAMILIES = [
    "llama",
    "llama3-rope-tied",
    "mistral-window",
    "qwen2-tied",
    "qwen3",
    "mixtral",
    "qwen3-moe",
]
LENGTHS = (1, 2, 15, 16, 17, 250, 1024, 3000)
TOKENS = 64


@pytest.mark.parametrize("family", FAMILIES)
async def test_64_greedy_tokens_are_those_of_transformers(family: str) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [oracle(family).greedy(p, TOKENS) for p in prompts]
    settings = ["engine.dtype=float32", "engine.max_chunk_tokens=700"]

    async with (
        live_stack(served_folder(family), settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=120) as client,
    ):
        alone = [await greedy_ids(client, p, TOKENS) for p in prompts[::3]]
        together = await asyncio.gather(*(greedy_ids(client, p, TOKENS) for p in prompts))

    assert alone == expected[::3]
    assert together == expected
