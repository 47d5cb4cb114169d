"""Instances in stages in a whole stack: any number of them in prefill into any in decode."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from support.child_processes import forked_child
from support.deadlines import HANG_S
from support.live_stack import (
    POOL_BYTES,
    REASONS,
    check_sampling,
    complete,
    eventually,
    going_on,
    greedy_ids,
    slowed,
)
from support.served_model import served_folder
from support.stage_host import StageHost
from support.tiny_models import oracle, prompt

MODEL = "qwen3-moe-mixed"  # four layers, one with a window
TINY = Path(__file__).parents[2] / "models" / "millrace-tiny"
LONG, SHORTS = prompt(6_000), [prompt(40 + i, seed=i) for i in range(4)]
#: Short ones come first as long as they are not late: a late request waits behind all others.
LONG_TTFT_S, SHORT_TTFT_S = 8 * HANG_S, 4 * HANG_S
SETTINGS = [
    *("engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"),
    *("store.finished_ttl_s=0", "scheduler.preemption=operator"),
]


def options(of_prefill: int, of_decode: int, **others: Any) -> StackOptions:
    """Stages by role; an instance of each."""
    prefill_settings = others.pop("prefill_settings", ())
    decode_settings = others.pop("decode_settings", ())
    given = {"model": str(served_folder(MODEL)), "prefill": 1, "decode": 1, **others}
    return StackOptions(
        model_name="tiny",
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[f"engine.kv_bytes={POOL_BYTES}", REASONS, *SETTINGS, *given.pop("settings", ())],
        role_settings={
            "prefill": [
                *(f"engine.stages={of_prefill}", "engine.max_chunk_tokens=128"),
                *prefill_settings,
            ],
            "decode": [f"engine.stages={of_decode}", *decode_settings],
        },
        **given,
    )


OWN = ["engine.kv_pools=own"]


async def test_stages_into_others_give_the_oracles_tokens() -> None:
    await any_into_any(2, 3, prefill_settings=OWN)


async def test_stages_on_other_hosts_give_the_oracles_tokens_also_after_a_death() -> None:
    hosts = {role: StageHost(served_folder(MODEL)) for role in ("prefill", "decode")}
    given = {f"{role}_settings": [f"engine.stage_hosts={h.address}"] for role, h in hosts.items()}
    try:
        async with (
            Stack(options(2, 2, **given)) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
        ):
            asked = [prompt(n, seed=n) for n in (600, 20, 45)]
            expected = [oracle(MODEL).greedy(ids, 6) for ids in asked]
            assert await asyncio.gather(*(greedy_ids(client, ids, 6) for ids in asked)) == expected
            service = stack.services["prefill-0"]
            hosts["prefill"].stage().kill()
            await eventually(lambda: service.restarts == 1)  # nothing runs, and it is noticed
            address = hosts["prefill"].address
            assert f"stage 1 at {address} died, killed by SIGKILL" in service.log_path.read_text()
            await eventually(lambda: service.serving)
            assert await asyncio.gather(*(greedy_ids(client, ids, 6) for ids in asked)) == expected
    finally:
        assert [host.end() for host in hosts.values()] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 4)])
@pytest.mark.parametrize("pools", ["shared", "own"])
async def test_any_stages_into_any(prefill: int, decode: int, pools: str) -> None:
    both = [f"engine.kv_pools={pools}"]
    await any_into_any(prefill, decode, prefill_settings=both, decode_settings=both)


async def any_into_any(prefill: int, decode: int, **settings: list[str]) -> None:
    async with (
        Stack(options(prefill, decode, **settings)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        prompts = [prompt(n, seed=n) for n in (600, 20, 45, 33)]
        found = await asyncio.gather(*(greedy_ids(client, ids, 6) for ids in prompts))
        for ids, answer in zip(prompts, found, strict=True):
            assert answer == oracle(MODEL).greedy(ids, 6)
        await check_sampling(client, prompts[0])


#: Requests with every sampling parameter and everything that an answer may carry.
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(200, 1), "temperature": 0},
    {"prompt": prompt(40, 2), "temperature": 0.9, "seed": 3, "n": 3, "top_p": 0.9},
    {"prompt": prompt(270, 3), "temperature": 0, "logprobs": 3, "echo": True},
    {"prompt": prompt(33, 4), "temperature": 0, "repetition_penalty": 1.8},
    {"prompt": prompt(50, 5), "seed": 8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"prompt": prompt(16, 6), "temperature": 0, "logit_bias": {"17": 100}},
    {"prompt": prompt(30, 7), "temperature": 0, "stop_token_ids": list(range(8, 160))},
    {"prompt": prompt(90, 8), "seed": 2, "top_k": 5, "min_tokens": 6, "logprobs": 0},
    {"prompt": prompt(900, 9), "temperature": 0, "max_tokens": 1},
    {"prompt": [prompt(20, 10), prompt(64, 11)], "temperature": 0},
]


def rounded(value: Any) -> Any:
    """The float32 sums of another batch differ in their last digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


async def answers(stack: Stack) -> list[Any]:
    given = {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client:
        found = await asyncio.gather(*(complete(client, **{**given, **body}) for body in BODIES))
        again = await asyncio.gather(*(complete(client, **{**given, **body}) for body in BODIES))
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in again]
    assert cached[0] > 0 and cached[8] > 0  # the second time they begin behind what is there
    assert rounded([a["choices"] for a in again]) == rounded([a["choices"] for a in found])
    return rounded([answer["choices"] for answer in found])


@pytest.mark.slow
async def test_every_kind_of_answer_is_the_whole_instances() -> None:
    async with Stack(options(1, 1)) as whole:
        expected = await answers(whole)
    async with Stack(options(3, 2)) as stack:
        assert await answers(stack) == expected
    async with Stack(options(2, 3, prefill_settings=OWN, decode_settings=OWN)) as stack:
        assert await answers(stack) == expected
    mixed = options(1, 1, colocated=1, colocation="mixed", settings=["engine.stages=2"])
    async with Stack(mixed) as stack:
        assert await answers(stack) == expected


@pytest.mark.slow
async def test_a_mixed_instance_has_stages_of_ranks() -> None:
    """Chunks and decodes in one pass, through two stages of two ranks each."""
    asked = [prompt(n, seed=n) for n in (600, 20, 45, 330)]
    both = ["engine.stages=2", "engine.tensor_parallel=2", "engine.max_chunk_tokens=64"]
    split = {"model": str(served_folder("llama")), "colocated": 1, "colocation": "mixed"}
    async with (
        Stack(options(1, 1, settings=both, **split)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        found = await asyncio.gather(*(greedy_ids(client, ids, 40) for ids in asked))
        assert found == [oracle("llama").greedy(ids, 40) for ids in asked]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_lost_a_stage_dies_and_comes_back_and_its_requests_go_on(role: str) -> None:
    stack_options = options(2, 2, **{role: 2})
    async with (
        Stack(stack_options) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        asked = [prompt(300 + 40 * i, i) for i in range(6)]
        running = [asyncio.create_task(greedy_ids(client, ids, 300)) for ids in asked]
        await asyncio.sleep(0.5)
        service = stack.services[f"{role}-0"]
        assert service.process is not None
        os.kill(forked_child(service.process.pid), signal.SIGKILL)
        found = await asyncio.gather(*running)
        assert found == [oracle(MODEL).greedy(ids, 300) for ids in asked]
        await eventually(lambda: service.restarts == 1)
        said = service.log_path.read_text()
        assert "stage 1 died, killed by SIGKILL" in said
        await eventually(lambda: service.serving)


@pytest.mark.slow
async def test_answers_go_on_in_stages_when_their_instance_is_killed() -> None:
    async with (
        Stack(options(2, 2, decode=2)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        asked = [prompt(100 + 60 * i, i) for i in range(6)]
        running = [asyncio.create_task(greedy_ids(client, ids, 600)) for ids in asked]
        await asyncio.sleep(1.0)
        process = stack.services["decode-0"].process
        assert process is not None
        process.kill()
        assert await asyncio.gather(*running) == [oracle(MODEL).greedy(ids, 600) for ids in asked]
        await eventually(lambda: stack.services["decode-0"].restarts == 1)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("model", "page_bytes", "ranks"), [(MODEL, 24576, 1), ("llama", 9216, 2)])
async def test_answers_that_grow_take_turns_in_a_memory_of_several_stages(
    model: str, page_bytes: int, ranks: int, elsewhere: bool
) -> None:
    settings = ["engine.prefix_cache=off", "scheduler.decode_reserve=grow"]
    settings += ["scheduler.decode_headroom_tokens=16"]
    decode = [f"engine.kv_bytes={21 * page_bytes}", f"engine.swap_bytes={80 * page_bytes}"]
    decode += [f"engine.tensor_parallel={ranks}"]
    hosts = [StageHost(served_folder(model))] if elsewhere else []
    decode += [f"engine.stage_hosts={host.address}" for host in hosts]
    asked = [(prompt(20 + 9 * i), 100 + 12 * i) for i in range(8)]
    given = {"model": str(served_folder(model)), "settings": settings, "decode_settings": decode}
    async with (
        Stack(options(2, 2, **given)) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        found = await asyncio.gather(*(greedy_ids(client, ids, most) for ids, most in asked))
        assert found == [oracle(model).greedy(ids, most) for ids, most in asked]
    assert [host.end() for host in hosts] == [0] * len(hosts)


async def traced(client: httpx.AsyncClient, ids: list[int], ttft_s: float, name: str = "") -> Any:
    """The answer of one token. `name`: the request's id."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0}
    headers = {"x-millrace-ttft-slo-ms": f"{ttft_s * 1000:.0f}", "x-millrace-trace": "1"}
    response = await client.post(
        "/v1/completions",
        json=body | {"return_token_ids": True},
        headers=headers | ({"x-millrace-request-id": name} if name else {}),
    )
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]


class LongOne:
    """A long prompt under way."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.name = uuid.uuid4().hex
        self.answer = asyncio.create_task(traced(client, LONG, LONG_TTFT_S, self.name))
        self._client = client

    async def has(self, tokens: int) -> bool:
        """Whether so many tokens are computed, or the answer is there."""
        response = await self._client.get(f"/v1/requests/{self.name}")
        known = response.status_code == 200
        return self.answer.done() or (known and response.json()["computed_tokens"] >= tokens)


async def passed(stack: Stack, client: httpx.AsyncClient, expected: list[list[int]]) -> bool:
    """Whether all short ones passed a long one that was begun. The tokens are right in any case."""
    long = LongOne(client)
    async with going_on(stack, "prefill") as pids, slowed(pids):
        await eventually(partial(long.has, 1))
        answers = await asyncio.gather(*(traced(client, ids, SHORT_TTFT_S) for ids in SHORTS))
        was_under_way = not long.answer.done()
    answers.append(await long.answer)
    assert [token_ids(answer) for answer in answers] == expected
    return was_under_way


@pytest.mark.slow
async def test_short_ones_pass_a_long_one_in_every_stage_and_a_cancelled_one_leaves() -> None:
    """The stack's end raises what any stage has left of the prompt that nobody wants any more."""
    chunks = ["engine.max_chunk_tokens=512", "engine.prefix_cache=off"]
    given = options(3, 1, model=str(TINY), settings=["engine.kv_bytes=300000000"])
    given.role_settings["prefill"][1:] = chunks
    async with (
        Stack(given) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        alone = await traced(client, LONG, LONG_TTFT_S)
        spans = [span["name"] for span in alone["millrace"]["spans"]]
        assert "later_stages" in spans and "chunk 11" in spans
        expected = [*[await greedy_ids(client, ids, 1) for ids in SHORTS], token_ids(alone)]

        async with asyncio.timeout(5 * HANG_S):
            while not await passed(stack, client, expected):
                pass  # the long one was done before the last short one came

        for share in (0, 0.1, 0.4, 0.7, 0.9):
            leaving = LongOne(client)
            await eventually(partial(leaving.has, round(share * len(LONG))))
            leaving.answer.cancel()
            await asyncio.gather(leaving.answer, return_exceptions=True)
        assert await greedy_ids(client, SHORTS[0], 1) == expected[0]
