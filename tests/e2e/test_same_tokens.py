"""Greedy and seeded answers have the same tokens alone, in random company, from cached prompts, and
computed again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from support.deadlines import HANG_S
from support.live_stack import live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

PAGE_BYTES = 3 * 2 * 2 * 16 * 12 * 2  # 16 tokens in bfloat16
PAGES = 21  # one and a half of eight answers, and the instance's own

BFLOAT16 = "engine.dtype=bfloat16"  # where another order of sums would show

BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(20 + 9 * i, seed=i), "max_tokens": 100 + 12 * i, "temperature": i % 2}
    | {"seed": i, "ignore_eos": True, "return_token_ids": True, "model": "tiny"}
    for i in range(8)
]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[int], set[str]]:
    """The answer's tokens, and what happened to it."""
    headers = {"x-millrace-trace": "1"}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    spans = {span["name"] for span in answer["millrace"]["spans"]}
    return answer["choices"][0]["token_ids"], spans


@pytest.mark.parametrize(
    "layout",
    [
        [],
        pytest.param(["engine.stages=2"], marks=pytest.mark.slow),
        pytest.param(["engine.tensor_parallel=2"], marks=pytest.mark.slow),
    ],
    ids=["whole", "stages", "ranks"],
)
async def test_answers_in_random_company_are_those_alone(layout: list[str]) -> None:
    settings = [BFLOAT16, *layout]
    chance = random.Random(4)
    async with (
        live_stack(served_folder("llama"), settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = [(await ask(client, body))[0] for body in BODIES]
        for _ in range(2):
            company = [
                {**BODIES[0], "prompt": prompt(chance.randint(1, 200), seed=n)} for n in range(8)
            ]
            bodies = [*BODIES, *company]
            order = chance.sample(range(len(bodies)), len(bodies))
            found = await asyncio.gather(*(ask(client, bodies[i]) for i in order))
            answers = dict(zip(order, found, strict=True))
            assert [answers[i][0] for i in range(len(BODIES))] == alone


@pytest.mark.slow
async def test_answers_that_are_computed_again_are_those_alone() -> None:
    settings = [
        BFLOAT16,
        "engine.prefix_cache=off",
        "scheduler.decode_reserve=grow",
        "scheduler.decode_headroom_tokens=16",
    ]
    decode = [f"engine.kv_bytes={PAGES * PAGE_BYTES}", "engine.swap_bytes=0"]
    async with (
        live_stack(
            served_folder("llama"), settings=settings, role_settings={"decode": decode}
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = [(await ask(client, body))[0] for body in BODIES]
        moved = 0
        for _ in range(20):  # on a busy machine few answers may be under way together
            found = await asyncio.gather(*(ask(client, body) for body in BODIES))
            assert [tokens for tokens, _ in found] == alone
            moved += sum("moved" in names for _, names in found)
            if moved >= 6:
                break
        assert moved >= 6
