"""Contexts larger than any one instance's memory, served by KVP workers: a whole stack's tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import httpx
import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.local.processes.service import Service
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import evict, get_instances
from support.deadlines import HANG_S
from support.live_stack import check_sampling, eventually, greedy_ids, held, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
PAGE_BYTES = 9216  # 16 tokens in float32
SETTINGS = [
    "engine.dtype=float32",
    "engine.max_batch=16",
    "scheduler.heartbeat_s=0.2",
    "scheduler.lease_s=2.0",
]
#: A decode instance holds 36 pages of requests (and one for what it sends on), a worker 64.
ROLES = {
    "decode": [f"engine.kv_bytes={37 * PAGE_BYTES}"],
    "kvp": [f"engine.kv_bytes={64 * PAGE_BYTES}"],
}
RANKS, STAGES = ["engine.tensor_parallel=2"], ["engine.stages=2"]
OWN = [*RANKS, "engine.kv_pools=own"]


@asynccontextmanager
async def stack_of(kvp: int, decode: int = 1) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """Its end raises what any process found left of a request."""
    async with (
        live_stack(
            served_folder(MODEL),
            prefill=1,
            decode=decode,
            kvp=kvp,
            settings=[*SETTINGS, "transfer.kv_checksum=on"],
            role_settings=ROLES,
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        yield stack, client


async def streamed_ids(
    client: httpx.AsyncClient, ids: list[int], tokens: int, begun: asyncio.Event
) -> list[int]:
    """The greedy continuation, as it comes; `begun` is set when some of it has."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    got: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in event_lines(response):
            if line.startswith("data: {"):
                chunk = orjson.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                got += chunk["choices"][0].get("token_ids") or []
                if len(got) >= 8:
                    begun.set()
    return got


async def worker_with_shards(stack: Stack) -> str:
    """A KVP worker that holds something, which its last heartbeats have to tell first."""
    address, found = f"127.0.0.1:{stack.services['scheduler'].port}", ""

    async def there_is_one() -> bool:
        nonlocal found
        for one in await get_instances(address):
            if one.role == "kvp" and one.held_requests:
                found = one.id
        return bool(found)

    await eventually(there_is_one)
    return found


async def test_long_contexts_spread_and_a_lost_worker_costs_no_answer() -> None:
    short = [prompt(length, seed) for seed, length in enumerate((5, 40, 200))]
    long = [prompt(900, 8), prompt(1700, 9)]  # over two and three instances
    lasting = prompt(800, 10)
    expected = [oracle(MODEL).greedy(p, 24) for p in [*short, *long]]
    async with stack_of(kvp=2) as (stack, client):
        answers = await asyncio.gather(*(greedy_ids(client, p, 24) for p in [*short, *long]))
        assert answers == expected
        await check_sampling(client, long[0])

        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 400, begun))
        async with held(stack, begun.is_set):
            killed = kill(stack, await worker_with_shards(stack))
        assert await answer == oracle(MODEL).greedy(lasting, 400)

        await eventually(lambda: killed.restarts == 1 and killed.serving)

        # Two thirds of an answer's memory die: what is left can't hold it, until the restarts.
        lasting = prompt(1700, 12)
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 400, begun))
        async with held(stack, begun.is_set):
            workers = [kill(stack, name) for name in ("kvp-0", "kvp-1")]
        async with asyncio.timeout(2 * HANG_S):
            assert await answer == oracle(MODEL).greedy(lasting, 400)
        await eventually(lambda: sum(worker.restarts for worker in workers) == 3)


def kill(stack: Stack, name: str) -> Service:
    """Kills a service, and returns it."""
    service = stack.services[name]
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGKILL)
    return service


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "owner"),
    [
        (OWN, OWN),
        (STAGES + OWN[-1:], RANKS + STAGES + OWN[-1:]),
        *product(([], ["engine.stages=3"]), (OWN, STAGES)),
        (RANKS + STAGES, RANKS + STAGES),
    ],
)
async def test_groups_of_prefills_in_stages_and_ranks_into_any_homes(
    prefill: list[str], owner: list[str]
) -> None:
    """SP, with PP or both PP and TP in each member, into TP, PP or both times KVP: any prefill
    layout into any decode layout."""
    prompts = [prompt(40, 20), prompt(900, 21), prompt(1500, 22)]
    expected = [oracle(MODEL).greedy(p, 20) for p in prompts]
    groups = ["scheduler.planner=fixed_sp", "scheduler.fixed_sp=2"]
    async with (
        live_stack(
            served_folder(MODEL),
            prefill=2,
            decode=1,
            kvp=2,
            settings=[*SETTINGS, *groups],
            role_settings={**ROLES, "prefill": prefill, "decode": [*ROLES["decode"], *owner]},
        ) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answers = await asyncio.gather(*(greedy_ids(client, p, 20) for p in prompts))
        assert answers == expected


@pytest.mark.slow
async def test_a_worker_that_drains_lets_its_requests_finish() -> None:
    lasting = prompt(800, 11)
    async with stack_of(kvp=2) as (stack, client):
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 200, begun))
        async with held(stack, begun.is_set):
            stack.remove(await worker_with_shards(stack))
        assert await answer == oracle(MODEL).greedy(lasting, 200)
        assert len(stack.instances("kvp")) == 1


@pytest.mark.slow
async def test_an_evicted_worker_s_answers_go_on_elsewhere() -> None:
    lasting = prompt(800, 12)
    async with stack_of(kvp=2) as (stack, client):
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 400, begun))
        scheduler = f"127.0.0.1:{stack.services['scheduler'].port}"
        async with held(stack, begun.is_set):
            await evict(scheduler, await worker_with_shards(stack), abort=False)
        assert await answer == oracle(MODEL).greedy(lasting, 400)


@pytest.mark.slow
async def test_decode_instances_hold_for_each_other() -> None:
    ids = [prompt(900, seed) for seed in range(3)]  # of two instances' 72 pages each takes 58
    async with stack_of(kvp=0, decode=2) as (_, client):
        answers = await asyncio.gather(*(greedy_ids(client, p, 16) for p in ids))
    assert answers == [oracle(MODEL).greedy(p, 16) for p in ids]


@pytest.mark.slow
async def test_an_owner_that_dies_ends_its_answer_elsewhere_and_frees_its_workers() -> None:
    lasting = prompt(800, 13)
    async with stack_of(kvp=2, decode=2) as (stack, client):
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 400, begun))
        async with held(stack, begun.is_set) as owner:
            await worker_with_shards(stack)
            kill(stack, owner)
        assert await answer == oracle(MODEL).greedy(lasting, 400)


@pytest.mark.slow
async def test_what_all_of_them_together_can_t_hold_is_refused() -> None:
    async with stack_of(kvp=1) as (_, client):
        body = {"model": "tiny", "prompt": prompt(2000, 1), "max_tokens": 8}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
        many = {"model": "tiny", "prompt": prompt(900, 1), "max_tokens": 8, "n": 2}
        response = await client.post("/v1/completions", json=many)
        assert response.status_code == 400, response.text


@pytest.mark.slow
async def test_a_worker_that_answers_no_more_holds_up_nobody_for_long() -> None:
    lasting = prompt(800, 14)
    async with stack_of(kvp=2) as (stack, client):
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, lasting, 400, begun))
        async with held(stack, begun.is_set):
            process = stack.services[await worker_with_shards(stack)].process
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
        try:
            assert await answer == oracle(MODEL).greedy(lasting, 400)
        finally:
            os.kill(process.pid, signal.SIGCONT)
