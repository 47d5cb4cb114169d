"""`scheduler.decode_reserve=grow`: answers in a memory far too small for all of them at once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.deadlines import HANG_S
from support.live_stack import live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
PAGE_BYTES = 3 * 2 * 2 * 16 * 12 * 4  # 16 tokens
PAGES = 21  # one and a half of eight answers, and the instance's own
ASKED = [(20 + 9 * i, 100 + 12 * i) for i in range(8)]
SAMPLED = 1.0  # temperature


async def ask(
    client: httpx.AsyncClient, tokens: int, most: int, temperature: float
) -> tuple[list[int], set[str]]:
    """The answer's tokens, and what happened to it."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt(tokens), "max_tokens": most}
    body |= {"temperature": temperature, "seed": most}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"x-millrace-trace": "1"}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    spans = {span["name"] for span in answer["millrace"]["spans"]}
    return answer["choices"][0]["token_ids"], spans


@pytest.mark.slow
@pytest.mark.parametrize("swap_pages", [80, 0], ids=["swap", "recompute"])
async def test_all_answers_come_and_are_right(swap_pages: int) -> None:
    settings = ["engine.dtype=float32", "engine.prefix_cache=off", "engine.deterministic=on"]
    settings += ["scheduler.decode_reserve=grow", "scheduler.decode_headroom_tokens=16"]
    decode = [
        f"engine.kv_bytes={PAGES * PAGE_BYTES}",
        f"engine.swap_bytes={swap_pages * PAGE_BYTES}",
    ]
    async with (
        live_stack(
            served_folder(MODEL), settings=settings, role_settings={"decode": decode}
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = [(await ask(client, *asked, SAMPLED))[0] for asked in ASKED]
        greedy = [oracle(MODEL).greedy(prompt(tokens), most) for tokens, most in ASKED]
        assert alone != greedy
        needed = {"preempted"} if swap_pages else {"preempted", "moved"}
        for temperature, expected in ((0.0, greedy), (SAMPLED, alone)):
            spans: set[str] = set()
            for _ in range(20):  # on a busy machine few answers may be under way together
                found = await asyncio.gather(*(ask(client, *asked, temperature) for asked in ASKED))
                assert [ids for ids, _ in found] == expected
                spans.update(*(names for _, names in found))
                if needed <= spans:
                    break
            assert needed <= spans
            assert swap_pages == 0 or "moved" not in spans
