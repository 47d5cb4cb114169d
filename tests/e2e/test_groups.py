"""Prompts computed by groups of prefill instances in a stack of real processes (Tetris)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import millrace.profiles
from millrace.stack import Stack
from support.live_stack import eventually, greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
#: Times of groups on GPUs, by which the planners plan; instances here are far slower.
PROFILE = Path(millrace.profiles.__file__).parent / "llama3-8b-a100-tp1.json"
SETTINGS = [
    *("engine.dtype=float32", f"engine.profile={PROFILE}"),
    *("scheduler.heartbeat_s=0.2", "scheduler.lease_s=1.0", "scheduler.preemption=operator"),
]


async def answered(client: httpx.AsyncClient, ids: list[int], tokens: int) -> dict[str, Any]:
    """The greedy answer with its waterfall."""
    response = await client.post(
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers={"x-millrace-trace": "1"},
    )
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def groups(answer: dict[str, Any]) -> list[int]:
    """Instances that computed each pass, where it was more than one."""
    spans = answer["millrace"]["spans"]
    return [int(s["attributes"]["group"]) for s in spans if "group" in s.get("attributes", {})]


def member(stack: Stack, name: str) -> int:
    process = stack.services[name].process
    assert process is not None
    return process.pid


@pytest.mark.slow
async def test_groups_answer_as_one_would() -> None:
    settings = [*SETTINGS, "scheduler.planner=cdsp", "scheduler.improvement_rate=0"]
    lengths = [2900, 40, 1600, 25]
    expected = [oracle(MODEL).greedy(prompt(n, seed=n), 3) for n in lengths]
    async with (
        live_stack(served_folder(MODEL), prefill=3, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as client,
    ):
        answers = await asyncio.gather(*(answered(client, prompt(n, seed=n), 3) for n in lengths))
        assert [token_ids(answer) for answer in answers] == expected
        assert max(n for answer in answers for n in groups(answer)) > 1


async def test_a_member_killed_in_the_ring_costs_no_request() -> None:
    """Its group goes on without it from what had landed at decode; nothing leaks."""
    settings = [
        *SETTINGS,
        *("scheduler.planner=fixed_sp", "scheduler.fixed_sp=4", "engine.max_chunk_tokens=16"),
    ]
    long, short = prompt(3000), prompt(30, seed=1)
    expected, short_expected = oracle(MODEL).greedy(long, 3), oracle(MODEL).greedy(short, 3)
    async with (
        live_stack(served_folder(MODEL), prefill=4, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as client,
    ):
        start_s = time.monotonic()
        whole = await answered(client, long, 3)
        alone_s = time.monotonic() - start_s
        assert token_ids(whole) == expected
        assert groups(whole) and set(groups(whole)) == {4}

        running = asyncio.create_task(answered(client, long, 3))
        await asyncio.sleep(alone_s / 2)
        os.kill(member(stack, "prefill-2"), signal.SIGKILL)
        killed_s = time.monotonic()
        assert await greedy_ids(client, short, 3) == short_expected
        short_s = time.monotonic() - killed_s
        answer = await running
        assert token_ids(answer) == expected
        assert short_s < alone_s + 2
        firsts = [
            int(s["attributes"]["history"])
            for s in answer["millrace"]["spans"]
            if s["name"].startswith("chunk")
        ]
        assert firsts[0] > 0, "it began anew instead of going on"
        await eventually(lambda: stack.services["prefill-2"].restarts == 1, 30)


@pytest.mark.slow
async def test_a_storm_of_prompts_and_deaths() -> None:
    """Short and long prompts on groups that change, while one member after another is killed."""
    settings = [
        *SETTINGS,
        *("scheduler.planner=cdsp", "scheduler.improvement_rate=0", "engine.max_chunk_tokens=32"),
        "scheduler.max_attempts=6",
    ]
    rng = random.Random(11)
    lengths = [rng.choice([20, 90, 400, 1500, 3000]) for _ in range(40)]
    expected = {n: oracle(MODEL).greedy(prompt(n, seed=n), 3) for n in sorted(set(lengths))}
    async with (
        live_stack(served_folder(MODEL), prefill=4, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=180) as client,
    ):
        running = []
        for number, tokens in enumerate(lengths):
            running.append(asyncio.create_task(answered(client, prompt(tokens, seed=tokens), 3)))
            await asyncio.sleep(rng.random() * 0.3)
            if number % 10 == 9:
                victim = f"prefill-{rng.randrange(4)}"
                before = stack.services[victim].restarts
                os.kill(member(stack, victim), signal.SIGKILL)
                back = partial(lambda name, n: stack.services[name].restarts > n, victim, before)
                await eventually(back, 30)
        answers = await asyncio.gather(*running)
        for tokens, answer in zip(lengths, answers, strict=True):
            assert token_ids(answer) == expected[tokens]
        assert max(n for answer in answers for n in groups(answer)) > 1
