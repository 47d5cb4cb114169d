"""A stack that scales itself: real processes start and drain under real requests, none is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from millrace.autoscale import Decision
from millrace.core.autoscale import DecodeTargets, PrefillTargets
from millrace.core.config import ScalingConfig
from millrace.stack import Stack
from millrace.stack_scaling import Scaling, autoscaled
from millrace.wire.scheduler_client import InstanceView, get_instances
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
    f"engine.kv_bytes={4 << 20}",  # 7,280 tokens
]
QUICK = ScalingConfig(
    interval_s=0.2, up_period_s=0.2, down_window_s=2.0, down_period_s=0.2, drain_timeout_s=30.0
)
#: Lower than where people would put them: what these tiny models compute is soon done.
TARGETS = {"prefill": PrefillTargets(backlog_s=0.05), "decode": DecodeTargets()}
CLIENTS = 8


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
            await self.ask(prompt(1100, rng.randrange(1 << 30)), 500)

    def serving(self, role: str) -> int:
        """Instances that serve."""
        services = self.stack.services
        return sum(services[name].serving for name in self.stack.instances(role))

    def largest(self, role: str) -> int:
        """Size that was recommended."""
        return max(d.recommendation.replicas for d in self.decisions if d.role == role)

    async def instances(self) -> list[InstanceView]:
        return await get_instances(f"127.0.0.1:{self.stack.services['scheduler'].port}")

    async def drains_with_an_answer(self) -> bool:
        views = await self.instances()
        return any(v.draining and v.held_requests and v.role == "decode" for v in views)

    def check_answers(self, sample: int = 4, tokens: int = 40) -> None:
        """All are whole, and those looked at closer begin with the right tokens."""
        assert all(len(answer) == asked for _, asked, answer in self.answers)
        for ids, _, answer in random.Random(0).sample(self.answers, sample):
            assert answer[:tokens] == oracle(MODEL).greedy(ids, tokens)[: len(answer)]


@asynccontextmanager
async def scaled_stack(scaling: Scaling, **options: object) -> AsyncIterator[Scaled]:
    async with (
        live_stack(served_folder(MODEL), prefill=1, settings=SETTINGS, **options) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=90) as client,
    ):
        found = Scaled(stack, client)
        try:
            async with autoscaled(stack, scaling, found.lines.append, found.decisions.append):
                yield found
        finally:
            print("\n".join(found.lines))


async def test_decode_follows_the_load_and_no_answer_is_lost() -> None:
    scaling = Scaling(sizes={"decode": (1, 2)}, config=QUICK)
    async with scaled_stack(scaling) as scaled:
        calm = asyncio.Event()
        clients = [asyncio.create_task(scaled.ask_until(calm, seed)) for seed in range(CLIENTS)]
        await eventually(lambda: scaled.serving("decode") == 2, 60)
        assert scaled.largest("decode") == 2

        # Less load: one long answer on each instance, of which one is to go.
        calm.set()
        await asyncio.gather(*clients)
        answers = [asyncio.create_task(scaled.ask(prompt(20, seed), 2400)) for seed in range(2)]
        await eventually(scaled.drains_with_an_answer, 20)
        await asyncio.gather(*answers)
        await eventually(lambda: len(scaled.stack.instances("decode")) == 1, 20)
        await scaled.ask(prompt(9), 4)
    scaled.check_answers()
