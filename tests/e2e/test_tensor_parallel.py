"""Instances of several ranks in a whole stack: any degree of prefill into any of decode."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from support.child_processes import forked_child
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, REASONS, check_sampling, eventually, greedy_ids
from support.served_model import served_folder
from support.tiny_models import oracle, prompt


def options(prefill: int, decode: int, pools: str = "auto") -> StackOptions:
    return StackOptions(
        model=str(served_folder("llama")),
        model_name="tiny",
        prefill=1,
        decode=1,
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[
            f"engine.kv_bytes={POOL_BYTES}",
            f"engine.kv_pools={pools}",
            "engine.dtype=float32",
            REASONS,
        ],
        role_settings={
            "prefill": [f"engine.tensor_parallel={prefill}", "engine.max_chunk_tokens=128"],
            "decode": [f"engine.tensor_parallel={decode}"],
        },
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "pools"),
    [
        (2, 1, "own"),
        pytest.param(1, 2, "own", marks=pytest.mark.slow),
        pytest.param(2, 2, "shared", marks=pytest.mark.slow),
    ],
)
async def test_any_degree_into_any_other_gives_the_oracles_tokens(
    prefill: int, decode: int, pools: str
) -> None:
    async with (
        Stack(options(prefill, decode, pools)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        prompts = [prompt(n, seed=n) for n in (600, 20, 45, 33)]
        found = await asyncio.gather(*(greedy_ids(client, ids, 6) for ids in prompts))
        await check_sampling(client, prompts[0])
    for ids, answer in zip(prompts, found, strict=True):
        assert answer == oracle("llama").greedy(ids, 6)


@pytest.mark.slow
async def test_an_instance_that_lost_a_rank_is_started_again() -> None:
    async with (
        Stack(options(2, 1)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await greedy_ids(client, prompt(40), 4)
        service = stack.services["prefill-0"]
        assert service.process is not None
        os.kill(forked_child(service.process.pid), signal.SIGKILL)
        await eventually(lambda: service.restarts == 1)  # nothing runs, and it is noticed
        await eventually(lambda: service.serving)
        assert await greedy_ids(client, prompt(40), 4) == expected
