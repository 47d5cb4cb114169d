"""Every family through the whole disaggregated path, token by token the same as transformers."""

import asyncio

import httpx
import pytest

from support.deadlines import HANG_S
from support.live_stack import greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

#: Those that differ on the way; what else an engine can do wrong shows in its own tests.
FAMILIES = ["qwen3-moe"]
MORE_FAMILIES = ["llama", "llama3-rope-tied", "mistral-window", "mixtral", "qwen2-tied", "qwen3"]
LENGTHS = (1, 2, 15, 16, 17, 250, 1500)
TOKENS = 32


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES)]
)
async def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [oracle(family).greedy(p, TOKENS) for p in prompts]
    settings = ["engine.dtype=float32", "engine.max_chunk_tokens=700"]

    async with (
        live_stack(served_folder(family), prefill=1, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = [await greedy_ids(client, p, TOKENS) for p in prompts[::3]]
        together = await asyncio.gather(*(greedy_ids(client, p, TOKENS) for p in prompts))

    assert alone == expected[::3]
    assert together == expected
