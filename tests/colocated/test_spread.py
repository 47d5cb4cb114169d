"""Requests whose KV a mixed instance computes and spreads over KVP workers.

The pass that computes a chunk of a prompt sends its K/V to the KVP workers.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from millrace.colocated.mixed import MixedRole
from millrace.core.scheduler.commands import Drain
from millrace.instance.role import WorkerContext
from millrace.kvp.role import KvpRole
from support.deadlines import eventually
from support.mixed_role import Mixed, mixed_config, mixed_instance, operators
from support.tiny_models import oracle, prompt

SETTINGS = mixed_config(
    {"min_chunk_tokens": 8, "chunk_step_tokens": 8, "t_target_ms": 0.5},
    max_batch=4,
    max_chunk_tokens=64,
)
PAGE = SETTINGS.engine.page_tokens_on("cpu")


def kvp(context: WorkerContext) -> KvpRole:
    return KvpRole(context, context.engine)


def another(context: WorkerContext) -> MixedRole:
    return MixedRole(context, operators())


async def freed(mixed: Mixed, request_id: str) -> None:
    for holder in mixed.holders:
        await holder.said("request_released", request_id)
    await eventually(lambda: mixed.used_pages == 0)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
async def test_tokens_are_the_models_beside_requests_that_are_whole(name: str) -> None:
    tokens, new = 9 * PAGE + 3, 2 * PAGE
    spread, over = oracle(name).greedy(prompt(tokens), new), asyncio.Event()
    wanted = {90: oracle(name).greedy(prompt(90), 40), 50: oracle(name).greedy(prompt(50), 40)}
    async with mixed_instance(SETTINGS, name=name, holders=[kvp, kvp]) as mixed:

        async def ask_again_and_again(length: int) -> None:
            """Has the instance decode until all is over."""
            for number in count():
                await mixed.ask(f"{length}-{number}", length, max_tokens=40)
                assert await mixed.answered(f"{length}-{number}") == wanted[length]
                if over.is_set():
                    return

        def met() -> bool:
            """Whether a batch had a chunk of a spread prompt and decodes."""
            return any(
                share.prompt.request.is_spread and plan.shape.decodes
                for plan in mixed.plans
                for share in plan.shares
            )

        with mixed.slowed(0.005):
            others = [asyncio.create_task(ask_again_and_again(length)) for length in wanted]
            await eventually(lambda: len(mixed.tokens) >= len(wanted))  # both decode
            for turn in range(20):  # a busy machine may leave nothing to decode for a while
                asked = f"r{turn}"
                ends = 2 * PAGE, 6 * PAGE, tokens + new
                await mixed.ask_spread(asked, tokens, *ends, max_tokens=new)
                assert await mixed.answered(asked) == spread
                if met():
                    break
            over.set()
            await asyncio.gather(*others)
        await freed(mixed, asked)
        assert met()


async def test_chunks_of_spread_prompts_are_reported() -> None:
    async with mixed_instance(SETTINGS, holders=[kvp]) as mixed:
        await mixed.ask_spread("r", 300, 3 * PAGE, 20 * PAGE, max_tokens=2)
        await mixed.ask("whole", 300, max_tokens=2)
        for name in ("r", "whole"):
            await mixed.live.said("request_finished", name)
            told = [one for kind, one in mixed.live.messages if kind == "prompt_advanced"]
            tokens = [one.tokens for one in told if one.request_id == name]
            assert len(tokens) >= 4 and tokens == sorted(set(tokens)) and max(tokens) < 300
        await freed(mixed, "r")


async def test_mixed_instances_hold_shards_for_each_other() -> None:
    async with mixed_instance(SETTINGS, holders=[another]) as mixed:
        await mixed.ask_spread("r", 100, 3 * PAGE, 8 * PAGE, max_tokens=20)
        assert await mixed.answered("r") == oracle("llama").greedy(prompt(100), 20)
        await freed(mixed, "r")


async def test_prompt_logprobs_and_penalties_of_spread_prompts() -> None:
    async with mixed_instance(SETTINGS, holders=[kvp]) as mixed:
        sampling = {"max_tokens": 6, "repetition_penalty": 2.0, "prompt_logprobs": 0}
        await mixed.ask("whole", 70, **sampling)
        await mixed.ask_spread("r", 70, 2 * PAGE, 5 * PAGE, **sampling)
        assert await mixed.answered("r") == await mixed.answered("whole")
        told = [
            [round(one.chosen[1], 3) for one in found[1:]]
            for event in mixed.events
            if (found := event.detail().prompt_logprobs)
        ]
        assert len(told) == 2 and told[0] == told[1]
        await freed(mixed, "r")


@pytest.mark.parametrize("after_token_one", [False, True])
async def test_a_lost_holder_costs_its_request_alone(after_token_one: bool) -> None:
    async with mixed_instance(SETTINGS, holders=[kvp]) as mixed:
        await mixed.ask("whole", 30, max_tokens=300)
        await mixed.ask_spread("r", 600, 2 * PAGE, 60 * PAGE, max_tokens=300)
        if after_token_one:
            await mixed.live.said("decode_started", "r")
        else:
            await mixed.live.said("chunk_started", "r")
        mixed.holders[0].role.on_command(Drain())
        if after_token_one:
            await eventually(lambda: mixed.ends.get(("r", 0)) == "moved")
        else:
            assert (await mixed.live.said("request_failed", "r")).retryable
        assert await mixed.answered("whole") == oracle("llama").greedy(prompt(30), 300)
        await freed(mixed, "r")


async def test_a_cancelled_one_lets_its_holders_go() -> None:
    async with mixed_instance(SETTINGS, holders=[kvp, kvp]) as mixed:
        await mixed.ask_spread("r", 300, 2 * PAGE, 6 * PAGE, 40 * PAGE, max_tokens=200)
        await mixed.live.said("chunk_started", "r")
        mixed.live.cancel("r")
        await freed(mixed, "r")
