"""Mixed instances behind the gateway: every feature of the API as separate roles serve it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import evict, get_instances
from support.deadlines import HANG_S
from support.live_stack import (
    POOL_BYTES,
    REASONS,
    check_sampling,
    complete,
    eventually,
    going_on,
    greedy_ids,
    live_stack,
    slowed,
)
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
SETTINGS = [
    *("engine.dtype=float32", "engine.max_chunk_tokens=256", "mixed.t_target_ms=10"),
    *("scheduler.heartbeat_s=0.2", "scheduler.lease_s=10", "store.finished_ttl_s=0"),
]

#: Requests with every sampling parameter and everything that an answer may carry.
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(200, 1), "temperature": 0},
    {"prompt": prompt(40, 2), "temperature": 0.9, "seed": 3, "n": 3, "top_p": 0.9},
    {"prompt": prompt(70, 3), "temperature": 0, "logprobs": 3, "echo": True},
    {"prompt": prompt(33, 4), "temperature": 0, "repetition_penalty": 1.8},
    {"prompt": prompt(50, 5), "seed": 8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"prompt": prompt(16, 6), "temperature": 0, "logit_bias": {"17": 100}},
    {"prompt": prompt(30, 7), "temperature": 0, "stop_token_ids": list(range(8, 160))},
    {"prompt": prompt(90, 8), "seed": 2, "top_k": 5, "min_tokens": 6, "logprobs": 0},
    {"prompt": prompt(1500, 9), "temperature": 0, "max_tokens": 1},
    {"prompt": [prompt(20, 10), prompt(64, 11)], "temperature": 0},
]


def options(colocated: int = 1, *more: str) -> StackOptions:
    return StackOptions(
        model=str(served_folder(MODEL)),
        model_name="tiny",
        colocated=colocated,
        colocation="mixed",
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[f"engine.kv_bytes={POOL_BYTES}", REASONS, *SETTINGS, *more],
    )


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True, **fields}


async def answers(client: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
    found = await asyncio.gather(*(complete(client, **body(fields)) for fields in BODIES))
    return [answer["choices"] for answer in found]


def rounded(value: Any) -> Any:
    """Log-probabilities to three digits: batches differ in how sums are rounded."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return value


async def test_one_instance_serves_it_all() -> None:
    async with Stack(options()) as stack:
        assert sorted(stack.services) == ["colocated-0", "proxy", "scheduler"]
        async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client:
            prompts = [prompt(n, seed=n) for n in (900, 20, 1, 45, 333)]
            greedy = asyncio.gather(*(greedy_ids(client, ids, 12) for ids in prompts))
            found = await answers(client)
            for ids, answer in zip(prompts, await greedy, strict=True):
                assert answer == oracle(MODEL).greedy(ids, 12)
            await check_sampling(client, prompts[3])
            again = await complete(client, prompt=prompts[0], max_tokens=1, temperature=0)
            traced = await client.post(
                "/v1/completions",
                json={"model": "tiny", **body(BODIES[0])},
                headers={"x-millrace-trace": "1"},
            )
    assert [len(choices) for choices in found] == [1, 3, 1, 1, 1, 1, 1, 1, 1, 2]
    assert len(found[2][0]["logprobs"]["tokens"]) == 70 + 16
    assert set(found[5][0]["token_ids"]) == {17}
    assert found[6][0]["finish_reason"] == "stop"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 896
    names = [span["name"] for span in traced.json()["millrace"]["spans"]]
    assert {"queued", "waiting", "chunk 0", "first_decode_step"} <= set(names)


@pytest.mark.slow
async def test_answers_are_those_of_separate_roles() -> None:
    async with (
        live_stack(served_folder(MODEL), settings=SETTINGS) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await answers(client)
    async with (
        Stack(options()) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        found = await answers(client)
    assert rounded(found) == rounded(expected)


@pytest.mark.slow
async def test_an_evicted_instances_answers_go_on_at_the_other() -> None:
    async with (
        Stack(options(2)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        prompts = [prompt(n, seed=n) for n in (300, 40, 90, 25)]
        asked = [asyncio.create_task(greedy_ids(client, ids, 600)) for ids in prompts]
        address = f"127.0.0.1:{stack.services['scheduler'].port}"

        async def both_run() -> bool:
            return all(one.running for one in await get_instances(address))

        async with going_on(stack, "colocated") as pids:
            async with slowed(pids):
                await eventually(both_run)
            await evict(address, "colocated-0", abort=False)
        for ids, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert answer == oracle(MODEL).greedy(ids, 600)


@pytest.mark.slow
async def test_a_killed_one_comes_back() -> None:
    async with (
        Stack(options()) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await greedy_ids(client, prompt(50), 4)
        process = stack.services["colocated-0"].process
        assert process is not None
        process.kill()

        async def is_back() -> bool:
            response = await client.get("/ready")
            return response.status_code == 200 and stack.services["colocated-0"].restarts > 0

        await eventually(is_back)
        assert await greedy_ids(client, prompt(50), 4) == expected
