"""Prefill and decode in one process: the same answers, preemption, a clean end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, eventually, greedy_ids
from support.served_model import served_folder
from support.tiny_models import oracle, prompt


def options(model: Path, colocated: int) -> StackOptions:
    return StackOptions(
        model=str(model),
        model_name="tiny",
        colocated=colocated,
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[
            *(f"engine.kv_bytes={POOL_BYTES}", "engine.dtype=float32"),
            *("engine.max_chunk_tokens=256", "scheduler.preemption=operator"),
            "scheduler.policy=millrace",
        ],
    )


async def test_two_colocated_instances_answer_as_the_oracle_does() -> None:
    """More requests at once than instances, so that a request's halves meet in every way."""
    async with Stack(options(served_folder("llama"), colocated=2)) as stack:
        assert sorted(stack.services) == ["colocated-0", "colocated-1", "proxy", "scheduler"]
        async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client:
            prompts = [prompt(n, seed=n) for n in (1500, 20, 700, 45, 90, 33, 400, 12)]
            found = await asyncio.gather(*(greedy_ids(client, ids, 12) for ids in prompts))
    for ids, answer in zip(prompts, found, strict=True):
        assert answer == oracle("llama").greedy(ids, 12)


async def test_a_killed_one_comes_back() -> None:
    async with (
        Stack(options(served_folder("llama"), colocated=1)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await greedy_ids(client, prompt(50), 4)
        process = stack.services["colocated-0"].process
        assert process is not None
        process.kill()

        async def is_back() -> bool:
            restarted = stack.services["colocated-0"].restarts
            return bool(restarted and (await client.get("/ready")).status_code == 200)

        await eventually(is_back)
        assert await greedy_ids(client, prompt(50), 4) == expected
