"""Prompts computed by groups of prefill instances in a stack of real processes (Tetris)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import millrace.profiles
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import get_instances
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
LONG, SHORT = prompt(1500), prompt(30, seed=1)
#: Times of groups on GPUs, by which the planners plan; instances here are far slower.
PROFILE = Path(millrace.profiles.__file__).parent / "llama3-8b-a100-tp1.json"
SETTINGS = [
    *("engine.dtype=float32", f"engine.profile={PROFILE}"),
    "scheduler.slow_factor=0",  # an instance that a busy machine holds up is in groups all the same
    *("scheduler.heartbeat_s=0.2", "scheduler.lease_s=10", "scheduler.preemption=operator"),
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
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answers = await asyncio.gather(*(answered(client, prompt(n, seed=n), 3) for n in lengths))
        assert [token_ids(answer) for answer in answers] == expected
        assert max(n for answer in answers for n in groups(answer)) > 1


def profile_of_dear_groups(folder: Path) -> Path:
    """A profile by which a token takes 20 ms alone; a group of 2 costs 20 s, and 1 ms a token."""
    found = json.loads(PROFILE.read_text())
    found["prefill"] = {
        "1": {"a": 0.0, "b": 0.02, "c": 0.0, "d": 0.0, "points": []},
        "2": {"a": 20.0, "b": 0.001, "c": 0.0, "d": 0.0, "points": []},
    }
    found["measured_sp"] = [2]
    path = folder / "dear-groups.json"
    path.write_text(json.dumps(found))
    return path


def group_sizes(answer: dict[str, Any]) -> list[int]:
    """Instances that computed each pass."""
    passes = (s for s in answer["millrace"]["spans"] if s["name"].startswith("chunk"))
    return [int(one["attributes"].get("group", 1)) for one in passes]


async def test_a_group_grows_from_chunk_to_chunk(tmp_path: Path) -> None:
    """CDSP at work (Tetris section 5.1): 1000 tokens take one instance for 20 s, by the profile.
    Meanwhile the other computes a first chunk of 3000 tokens, and both the rest.
    """
    settings = [
        *("engine.dtype=float32", f"engine.profile={profile_of_dear_groups(tmp_path)}"),
        *("engine.max_chunk_tokens=16", "engine.prefix_cache=off", "scheduler.policy=fcfs"),
        *("scheduler.planner=cdsp", "scheduler.improvement_rate=0.05", "scheduler.preemption=none"),
        *("scheduler.slow_factor=0", "transfer.kv_checksum=on"),
        f"scheduler.lease_s={HANG_S}",
    ]
    short, long = prompt(1000, seed=1), prompt(3000, seed=2)
    expected = [oracle(MODEL).greedy(ids, 3) for ids in (short, long)]
    async with (
        live_stack(served_folder(MODEL), prefill=2, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        with stopped(stack, "prefill-0", "prefill-1"):
            running = asyncio.create_task(answered(client, short, 3))
            await eventually(lambda: have_work(stack, 1))
            planned = asyncio.create_task(answered(client, long, 3))
            await eventually(lambda: have_work(stack, 2))
        answers = await asyncio.gather(running, planned)
    assert [token_ids(answer) for answer in answers] == expected
    sizes = group_sizes(answers[1])
    assert sizes[0] == 1 and sizes[-1] == 2 and sizes == sorted(sizes), sizes


@contextmanager
def stopped(stack: Stack, *names: str) -> Iterator[None]:
    """Stops services inside the block: nothing ends before all of it is planned."""
    for name in names:
        os.kill(member(stack, name), signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            os.kill(member(stack, name), signal.SIGCONT)


async def have_work(stack: Stack, instances: int) -> bool:
    """Whether the scheduler has given so many prefill instances work."""
    found = await get_instances(f"127.0.0.1:{stack.services['scheduler'].port}")
    return sum(one.role == "prefill" and one.held_requests > 0 for one in found) == instances


async def test_a_member_killed_in_the_ring_costs_no_request() -> None:
    """Its group goes on without it from what had landed at decode; nothing leaks."""
    settings = [
        *SETTINGS,
        *("scheduler.planner=fixed_sp", "scheduler.fixed_sp=4", "engine.max_chunk_tokens=16"),
        "engine.prefix_cache=off",
    ]
    async with (
        live_stack(served_folder(MODEL), prefill=4, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        start_s = time.monotonic()
        whole = await answered(client, LONG, 3)
        alone_s = time.monotonic() - start_s
        assert token_ids(whole) == oracle(MODEL).greedy(LONG, 3)
        assert groups(whole) and set(groups(whole)) == {4}

        async with asyncio.timeout(5 * HANG_S):
            while not await went_on_after_a_death(stack, client, alone_s / 2):
                pass  # the death came before the first tokens had landed, or after the last


async def went_on_after_a_death(stack: Stack, client: httpx.AsyncClient, wait_s: float) -> bool:
    """Kills a member of the long prompt's group. Whether the rest began behind the first token;
    the answers are right in any case.
    """
    restarts = stack.services["prefill-2"].restarts
    running = asyncio.create_task(answered(client, LONG, 3))
    await asyncio.sleep(wait_s)
    os.kill(member(stack, "prefill-2"), signal.SIGKILL)
    assert await greedy_ids(client, SHORT, 3) == oracle(MODEL).greedy(SHORT, 3)
    answer = await running
    assert token_ids(answer) == oracle(MODEL).greedy(LONG, 3)
    await eventually(lambda: stack.services["prefill-2"].restarts == restarts + 1)
    await eventually(lambda: stack.services["prefill-2"].serving)
    spans = answer["millrace"]["spans"]
    first = next(one for one in spans if one["name"].startswith("chunk"))
    return int(first["attributes"]["history"]) > 0


@pytest.mark.slow
async def test_a_storm_of_prompts_and_deaths() -> None:
    """Short and long prompts on groups that change, while one member after another is killed."""
    settings = [
        *SETTINGS,
        *("scheduler.planner=cdsp", "scheduler.improvement_rate=0", "engine.max_chunk_tokens=32"),
        "scheduler.max_deaths=6",
    ]
    rng = random.Random(11)
    lengths = [rng.choice([20, 90, 400, 1500, 3000]) for _ in range(40)]
    expected = {n: oracle(MODEL).greedy(prompt(n, seed=n), 3) for n in sorted(set(lengths))}
    async with (
        live_stack(served_folder(MODEL), prefill=4, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
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
                await eventually(back)
        answers = await asyncio.gather(*running)
        for tokens, answer in zip(lengths, answers, strict=True):
            assert token_ids(answer) == expected[tokens]
        assert max(n for answer in answers for n in groups(answer)) > 1
