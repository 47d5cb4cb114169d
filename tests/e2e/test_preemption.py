"""Short requests pass a long prefill in a stack of real processes; everybody gets their tokens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.core.priority import POLICIES
from support.deadlines import HANG_S
from support.live_stack import greedy_ids, live_stack
from support.tiny_models import prompt

MODEL = Path(__file__).parents[2] / "models" / "millrace-tiny"
LONG = 3_000
#: Short ones come first as long as they are not late: a late request waits behind all others.
LONG_TTFT_S, SHORT_TTFT_S = 8 * HANG_S, 4 * HANG_S
SHORTS = range(6)


async def timed(client: httpx.AsyncClient, ids: list[int], ttft_s: float) -> tuple[float, Any]:
    """Seconds until the answer of one token, and the answer."""
    start_s = time.monotonic()
    response = await client.post(
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        },
        headers={"x-millrace-ttft-slo-ms": f"{ttft_s * 1000:.0f}", "x-millrace-trace": "1"},
    )
    assert response.status_code == 200, response.text
    return time.monotonic() - start_s, response.json()


@pytest.mark.parametrize("policy", [pytest.param("s_edf", marks=pytest.mark.slow), "millrace"])
async def test_short_ones_pass_a_long_one(policy: str) -> None:
    settings = [
        *("engine.dtype=float32", "engine.kv_bytes=200000000", "engine.prefix_cache=off"),
        f"scheduler.policy={policy}",
        "scheduler.preemption=operator",
    ]
    async with (
        live_stack(MODEL, prefill=1, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        long, shorts = prompt(LONG), [prompt(40 + i, seed=i) for i in SHORTS]
        alone_s, alone = await timed(client, long, LONG_TTFT_S)
        expected = [alone["choices"][0]["token_ids"]]
        expected += [await greedy_ids(client, ids, 1) for ids in shorts]

        async with asyncio.timeout(5 * HANG_S):
            while not await passed(client, long, shorts, alone_s, expected):
                pass  # the long one was done before a short one came


async def passed(
    client: httpx.AsyncClient,
    long: list[int],
    shorts: list[list[int]],
    alone_s: float,
    expected: list[list[int]],
) -> bool:
    """Whether the long one was preempted, this time. All get their tokens in any case."""
    running = asyncio.create_task(timed(client, long, LONG_TTFT_S))
    answers, were_first = [], False
    for ids in shorts:
        await asyncio.sleep(alone_s / 10)
        answers.append(await timed(client, ids, SHORT_TTFT_S))
        were_first |= not running.done()
    _, answer = await running
    got = [found["choices"][0]["token_ids"] for found in (answer, *(a for _, a in answers))]
    assert got == expected
    names = [span["name"] for span in answer["millrace"]["spans"]]
    return were_first and "preempted" in names


@pytest.mark.slow
async def test_all_policies_serve_a_mix_with_preemption_and_batches() -> None:
    """The instance takes what any policy orders, one after another in one stack."""
    settings = [
        *("engine.dtype=float32", "engine.kv_bytes=200000000", "engine.prefix_cache=off"),
        "scheduler.preemption=layer",
        "scheduler.batch_tokens=256",
    ]
    async with (
        live_stack(MODEL, prefill=1, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        prompts = [prompt(n, seed=n) for n in (2500, 30, 60, 900, 45, 20)]
        expected = [await greedy_ids(client, ids, 4) for ids in prompts]
        for policy in POLICIES:
            response = await client.put("/admin/scheduler", json={"policy": policy})
            assert response.status_code == 200, response.text
            found = await asyncio.gather(*(greedy_ids(client, ids, 4) for ids in prompts))
            assert found == expected, policy
