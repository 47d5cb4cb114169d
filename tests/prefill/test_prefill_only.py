"""Prefill-only requests: the leader sends the result to the proxy, and decode never hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
import pytest
import torch

from millrace.core.config import Config
from millrace.core.request_spec import RequestSpec
from millrace.core.token_events import TokenDetail
from support.deadlines import HANG_S, eventually
from support.metrics import total
from support.prefill_group import Group, Plan, group_of
from support.role_pair import Proxy, listening, with_blocks
from support.tiny_models import oracle, prompt
from support.worker_roles import config, order, spec

SETTINGS = config(max_chunk_tokens=64)
TOLERANCE = 2e-4


def only(name: str, tokens: int, pooling: str = "", **sampling: int) -> RequestSpec:
    """A request that generates nothing."""
    return spec(name, tokens, pooling=pooling, max_tokens=0, **sampling)


def vector(detail: TokenDetail) -> npt.NDArray[np.float32]:
    return np.frombuffer(detail.pooled, dtype="<f4")


def pooled(model: str, ids: Sequence[int], pooling: str) -> npt.NDArray[np.float32]:
    """What `transformers` gives."""
    hidden = oracle(model).hidden(ids)
    found = hidden[-1] if pooling == "last" else hidden.mean(0)
    return np.array(found.numpy(), dtype=np.float32)


class Scene:
    """A group whose first instance leads; `proxy` hears the results."""

    def __init__(self, group: Group, proxy: Proxy) -> None:
        self.group, self.proxy = group, proxy
        self.leader = group.prefills[0]

    async def result(self, request: RequestSpec, plan: Plan) -> TokenDetail:
        """Has the request computed; returns its result once all have released it."""
        await self.group.ask_result(request, plan)
        return await self.heard(request.request_id)

    async def heard(self, name: str) -> TokenDetail:
        assert await self.proxy.answered(name) == []
        assert self.proxy.ends[name, 0] == "length"
        released = await self.leader.said("request_released", name)
        assert released.complete
        event = next(event for event in self.proxy.events if event.request_id == name)
        return event.detail()


@asynccontextmanager
async def scene(
    size: int, settings: Config = SETTINGS, model: str = "llama"
) -> AsyncIterator[Scene]:
    async with group_of(size, settings, model) as group:
        proxy = Proxy(group.prefills[0])
        async with listening(proxy):
            yield Scene(group, proxy)
        assert not group.decode.messages  # decode hears of none


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("model", ["llama", "mistral-window", "qwen2-tied", "qwen3", "mixtral"])
async def test_vectors_are_those_of_transformers(model: str, pooling: str) -> None:
    async with scene(1, model=model) as one:
        for tokens in (1, 64, 150):
            request = only(f"r{tokens}", tokens, pooling)
            detail = await one.result(request, [(tokens, [0])])
            expected = pooled(model, prompt(tokens), pooling)
            np.testing.assert_allclose(vector(detail), expected, atol=TOLERANCE)
        advanced = ["prompt_advanced"] * 2  # after 64 and 128 tokens
        kinds = one.leader.kinds("r150")
        assert kinds == ["chunk_started", *advanced, "chunk_finished", "request_released"]
        assert total(one.leader.registry, "millrace_prefill_answered_requests_total") == 3


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
async def test_any_plan_of_a_group_gives_the_same_vector(model: str, pooling: str) -> None:
    plans: list[Plan] = [
        [(250, [0, 1])],
        [(100, [0]), (150, [0, 2, 1])],
        [(3, [0, 1, 2])],
        [(70, [0, 1]), (90, [0, 1]), (140, [0, 1, 2])],
    ]
    async with scene(3, model=model) as many:
        for number, plan in enumerate(plans):
            tokens = sum(count for count, _ in plan)
            detail = await many.result(only(f"r{number}", tokens, pooling), plan)
            expected = pooled(model, prompt(tokens), pooling)
            np.testing.assert_allclose(vector(detail), expected, atol=TOLERANCE, err_msg=str(plan))
            await many.group.idle()


@pytest.mark.parametrize("plan", [[(150, [0])], [(150, [0, 1])]])
async def test_log_probabilities_without_a_token(plan: Plan) -> None:
    async with scene(2) as many:
        detail = await many.result(only("r", 150, prompt_logprobs=1, n=2), plan)
        await eventually(lambda: ("r", 1) in many.proxy.ends)  # one event per choice
    found = detail.prompt_logprobs
    assert detail.pooled == b"" and found[0] is None
    wanted = oracle("llama").logits(prompt(150))[:-1].log_softmax(-1)
    told = torch.tensor([one.chosen[1] for one in found[1:] if one is not None])
    expected = wanted[torch.arange(149), torch.tensor(prompt(150)[1:])]
    torch.testing.assert_close(told, expected, rtol=1e-3, atol=1e-3)


async def test_a_suspended_mean_counts_every_token_once() -> None:
    async with scene(1, config(max_chunk_tokens=256)) as one:

        def computes() -> bool:
            told = [kind for kind in one.leader.kinds("long") if kind != "prompt_advanced"]
            return told[-1:] == ["chunk_started"]

        with one.leader.held(lambda task: task.name == "long" and task.history_tokens >= 256):
            await one.group.ask_result(only("long", 600, "mean"), [(600, [0])])
            for number in range(3):
                await eventually(computes)
                short = only(f"short-{number}", 20, "last")
                await one.group.ask_result(short, [(20, [0])])
                one.leader.role.on_command(order(short.request_id, "long"))
                detail = await one.heard(short.request_id)
                expected = pooled("llama", prompt(20), "last")
                np.testing.assert_allclose(vector(detail), expected, atol=TOLERANCE)
        detail = await one.heard("long")
        assert "chunk_suspended" in one.leader.kinds("long")
        expected = pooled("llama", prompt(600), "mean")
        np.testing.assert_allclose(vector(detail), expected, atol=TOLERANCE)


async def test_a_cached_prefix_serves_the_last_token_and_no_mean() -> None:
    async with scene(1) as one:
        ids = prompt(200)
        for name, pooling, cached in (("a", "last", 0), ("b", "last", 192), ("c", "mean", 0)):
            request = with_blocks(only(name, 200, pooling), ids)
            detail = await one.result(request, [(200, [0])])
            assert detail.cached_tokens == cached
            np.testing.assert_allclose(
                vector(detail), pooled("llama", ids, pooling), atol=TOLERANCE
            )


async def test_batched_prompts_get_their_own_vectors() -> None:
    async with scene(1, config(max_chunk_tokens=512)) as one:
        one.group.store.gate.clear()
        names = ["a", "b", "c"]
        kinds = ["last", "mean", "last"]
        for name, pooling, tokens in zip(names, kinds, (30, 40, 50), strict=True):
            await one.group.ask_result(only(name, tokens, pooling), [(tokens, [0])])
        one.leader.role.on_command(order(*names))
        one.group.store.gate.set()
        for name, pooling, tokens in zip(names, kinds, (30, 40, 50), strict=True):
            expected = pooled("llama", prompt(tokens), pooling)
            np.testing.assert_allclose(vector(await one.heard(name)), expected, atol=TOLERANCE)


async def test_a_cancelled_one_sends_nothing_and_holds_nothing() -> None:
    async with scene(2, config(max_chunk_tokens=256)) as many:
        with many.leader.held(lambda task: task.name == "r"):
            await many.group.ask_result(only("r", 600, "mean"), [(600, [0, 1])])
            await many.leader.said("chunk_started", "r")
            for role in many.group.prefills:
                role.cancel("r")
            released = await many.leader.said("request_released", "r")
            assert not released.complete
        await many.group.idle()
        assert not many.proxy.events


async def test_a_lost_proxy_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outbox fills up while it reads nothing: nobody waits for the result."""
    monkeypatch.setattr("millrace.instance.tokens.streams.MOST_WAITING_EVENTS", 0)
    async with group_of(1, config(max_chunk_tokens=256)) as group:
        [prefill] = group.prefills
        with prefill.held(lambda task: task.name == "long"):
            await group.ask_result(only("long", 600, "mean"), [(600, [0])])
            await prefill.said("chunk_started", "long")
            await group.ask_result(only("short", 20, "last"), [(20, [0])])
            prefill.role.on_command(order("short", "long"))
            released = await prefill.said("request_released", "long")
            assert not released.complete
        await asyncio.wait_for(prefill.role.wait_idle(), HANG_S)
