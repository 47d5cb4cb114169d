"""A stack that scales itself: real processes start and drain under real requests, none is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle

import httpx
import pytest

from millrace.core.autoscale.rules import DecodeTargets, PrefillTargets
from millrace.core.config import ScalingConfig
from millrace.local.autoscale import Decision
from millrace.local.scaling import PARKING, Scaling, autoscaled
from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "llama"
SETTINGS = [
    "engine.dtype=float32",
    "engine.profile=none",
    "engine.max_chunk_tokens=32",  # so that prompts take a while
    "scheduler.heartbeat_s=0.2",
    "scheduler.lease_s=2.0",
    f"engine.kv_bytes={2 << 20}",  # 3,640 tokens
]
QUICK = ScalingConfig(
    interval_s=0.2, up_period_s=0.2, down_window_s=1.0, down_period_s=0.2, drain_timeout_s=30.0
)
#: Lower than where people would put them: what these tiny models compute is soon done.
TARGETS = {"prefill": PrefillTargets(backlog_s=0.05), "decode": DecodeTargets()}
CLIENTS = 8
STORM_S, MOST_STRIKES = 60.0, 15
#: More than that: none of the requests looks as if it killed its instances.
SPARED = f"scheduler.max_deaths={MOST_STRIKES + 1}"


class Scaled:
    """A running stack, what its scaling said, and what was asked of it."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self.stack = stack
        self.client = client
        self.lines: list[str] = []
        self.decisions: list[Decision] = []
        self.answers: list[tuple[list[int], int, list[int]]] = []  # prompt, tokens, answer

    async def ask(self, ids: list[int], tokens: int) -> None:
        """A request that must succeed; its answer is looked at in the end."""
        self.answers.append((ids, tokens, await greedy_ids(self.client, ids, tokens)))

    async def ask_until(self, calm: asyncio.Event, seed: int) -> None:
        """One request after another. Four fill a decode instance's KV."""
        rng = random.Random(seed)
        while not calm.is_set():
            await self.ask(prompt(550, rng.randrange(1 << 30)), 250)

    async def answer_until(self, gone: asyncio.Event, seed: int) -> None:
        """One long answer after another, that ends when others' don't. Four fit into one instance
        and leave two half empty: somebody is in the middle of one whenever an instance is to go."""
        await asyncio.sleep(0.3 * seed)
        rng = random.Random(seed)
        while not gone.is_set():
            await self.ask(prompt(20, rng.randrange(1 << 30)), 600)

    def serving(self, role: str) -> int:
        """Instances that serve."""
        services = self.stack.services
        return sum(services[name].serving for name in self.stack.instances(role))

    def largest(self, role: str) -> int:
        """Size that was recommended."""
        return max(d.recommendation.replicas for d in self.decisions if d.role == role)

    def check_answers(self, sample: int = 4, tokens: int = 40) -> None:
        """All are whole, and those looked at closer begin with the right tokens."""
        assert all(len(answer) == asked for _, asked, answer in self.answers)
        for ids, _, answer in random.Random(0).sample(self.answers, sample):
            assert answer[:tokens] == oracle(MODEL).greedy(ids, tokens)[: len(answer)]


@asynccontextmanager
async def scaled_stack(scaling: Scaling, *settings: str) -> AsyncIterator[Scaled]:
    async with (
        live_stack(served_folder(MODEL), prefill=1, settings=[*SETTINGS, *settings]) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        found = Scaled(stack, client)
        try:
            async with autoscaled(stack, scaling, found.lines.append, found.decisions.append):
                yield found
        finally:
            print("\n".join(found.lines))


@pytest.mark.parametrize(
    "drain_timeout_s",
    [
        pytest.param(2 * HANG_S, id="in peace"),
        pytest.param(0.01, id="evicted", marks=pytest.mark.slow),
    ],
)
async def test_decode_follows_the_load_and_no_answer_is_lost(drain_timeout_s: float) -> None:
    config = replace(QUICK, drain_timeout_s=drain_timeout_s)
    scaling = Scaling(sizes={"decode": (1, 2)}, config=config)
    async with scaled_stack(scaling) as scaled:
        calm = asyncio.Event()
        clients = [asyncio.create_task(scaled.ask_until(calm, seed)) for seed in range(CLIENTS)]
        await eventually(lambda: scaled.serving("decode") == 2)
        assert scaled.largest("decode") == 2

        # Less load: long answers on each instance, of which one is to go.
        calm.set()
        await asyncio.gather(*clients)
        gone = asyncio.Event()
        answers = [asyncio.create_task(scaled.answer_until(gone, seed)) for seed in range(4)]
        await eventually(lambda: len(scaled.stack.instances("decode")) == 1)
        gone.set()
        await asyncio.gather(*answers)
        evicted = [line for line in scaled.lines if line.endswith("is migrated")]
        assert bool(evicted) == (drain_timeout_s < 1)
        for ids, tokens, answer in scaled.answers[-4:] if evicted else ():
            assert answer == await greedy_ids(scaled.client, ids, tokens)
        await scaled.ask(prompt(9), 4)
    scaled.check_answers()


@pytest.mark.slow
async def test_an_idle_stack_goes_entirely_and_the_next_request_wakes_it() -> None:
    sizes = {"prefill": (1, 2), "decode": (1, 2)}
    scaling = Scaling(sizes=sizes, config=replace(QUICK, idle_s=0.5), to_zero=True)
    async with scaled_stack(scaling, PARKING) as scaled:
        services = scaled.stack.services
        await scaled.ask(prompt(50), 20)
        await eventually(lambda: set(services) == {"scheduler", "proxy"})

        await asyncio.gather(*(scaled.ask(prompt(50, seed), 20) for seed in range(3)))
        assert {"prefill-1", "decode-1"} <= set(services)
    scaled.check_answers(tokens=20)


async def strike_at_random(stack: Stack, rng: random.Random, until_s: float) -> Counter[str]:
    """Kills instances that serve, or drain; returns how many of each role."""
    struck: Counter[str] = Counter()
    while time.monotonic() < until_s and struck.total() < MOST_STRIKES:
        await asyncio.sleep(rng.uniform(3, 6))
        role = rng.choice(["prefill", "decode"])
        serving = [name for name in stack.instances(role) if stack.services[name].serving]
        victim = stack.services[rng.choice(serving)].process if serving else None
        if victim is not None and victim.returncode is None:
            struck[role] += 1
            os.kill(victim.pid, signal.SIGKILL)
    return struck


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_storm_of_deaths_while_it_scales_loses_nothing() -> None:
    """Load in waves, so that pools grow and shrink all the time; drains end in evictions."""
    seed = random.SystemRandom().randrange(1000)
    rng = random.Random(seed)
    print(f"seed {seed}")
    scaling = Scaling(
        sizes={"prefill": (1, 3), "decode": (1, 3)},
        config=replace(QUICK, down_window_s=1.0, drain_timeout_s=0.5),
        targets=TARGETS,
    )
    async with scaled_stack(scaling, PARKING, SPARED) as scaled:
        until_s = time.monotonic() + STORM_S
        strikes = asyncio.create_task(strike_at_random(scaled.stack, rng, until_s))
        for crowd in cycle([CLIENTS, 1, CLIENTS, 3]):
            if time.monotonic() >= until_s:
                break
            calm = asyncio.Event()
            clients = [
                asyncio.create_task(scaled.ask_until(calm, rng.randrange(1 << 30)))
                for _ in range(crowd)
            ]
            await asyncio.sleep(rng.uniform(4, 10))
            calm.set()
            await asyncio.gather(*clients)
        print(f"struck: {dict(await strikes)}, {len(scaled.answers)} answers")
        at_rest = {"prefill": 1, "decode": 1}
        await eventually(lambda: {r: scaled.serving(r) for r in at_rest} == at_rest)
        await scaled.ask(prompt(9), 4)
    assert scaled.largest("decode") > 1
    scaled.check_answers(sample=12)
