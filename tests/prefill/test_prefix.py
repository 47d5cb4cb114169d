"""A prefill instance keeps the KV of prompts, and computes only uncached tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest_asyncio

from millrace.core.request import Chunk
from millrace.core.scheduler.commands import KvShard
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from support.deadlines import eventually
from support.kv_holders import Holder, holders
from support.memory_transport import MemoryHub
from support.role_pair import SHARING, CacheView, Pair, live_pair, with_blocks
from support.tiny_models import oracle, prompt
from support.worker_roles import (
    LiveRole,
    admit_decode,
    config,
    live_roles,
    order,
    registration,
    remember,
    run_prefill,
    spec,
)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with live_pair(SHARING) as made:
        yield made


async def test_a_prompt_that_came_before_is_computed_from_its_last_block_on(
    pair: Pair,
) -> None:
    ids = prompt(300)
    expected = oracle("llama").greedy(ids, 8)
    assert await pair.answer("first", ids) == expected
    assert await pair.answer("again", ids) == expected

    assert (pair.cached("first"), pair.cached("again")) == (0, 256)
    assert pair.computed("first") == [(0, 150), (150, 150)]
    assert pair.computed("again") == [(256, 44)]
    assert pair.span("again", "cached").attributes["tokens"] == "256"
    assert not [span for span in pair.spans("first") if span.name == "cached"]
    text = pair.prefill.registry.render()[0].decode()
    assert "millrace_prefill_cached_tokens_total 256.0" in text
    assert "millrace_prefill_computed_tokens_total 344.0" in text
    assert "millrace_kv_cached_pages 16.0" in text


async def test_the_last_token_is_computed_even_if_all_blocks_are_there(pair: Pair) -> None:
    ids = prompt(256)
    expected = oracle("llama").greedy(ids, 8)
    assert await pair.answer("first", ids) == expected
    assert await pair.answer("again", ids) == expected
    assert pair.computed("again") == [(192, 64)]


async def test_prompts_that_part_ways_share_what_they_have_in_common(pair: Pair) -> None:
    ids = prompt(200)
    await pair.answer("one", ids)
    other = ids[:150] + prompt(150, seed=2)
    assert await pair.answer("other", other) == oracle("llama").greedy(other, 8)
    assert pair.cached("other") == 128


async def test_sampled_answers_are_those_without_a_cache(pair: Pair) -> None:
    sampling = {
        **{"n": 2, "temperature": 1.2, "top_p": 0.9, "seed": 7, "max_tokens": 12, "logprobs": 2},
        **{"repetition_penalty": 1.3, "presence_penalty": 0.4},
    }
    ids = prompt(170)
    await pair.answer("first", ids, **sampling)
    await pair.answer("again", ids, **sampling)
    await eventually(lambda: {("first", 1), ("again", 1)} <= pair.ends.keys())
    assert pair.cached("again") == 128
    for choice in range(2):
        assert pair.tokens["again", choice] == pair.tokens["first", choice]


async def test_chunks_that_are_cached_are_over_at_once(pair: Pair) -> None:
    """The scheduler waits for the end of each chunk."""
    ids = prompt(300)
    await pair.answer("first", ids)
    request = await pair.request("r", ids)
    chunks = tuple(
        Chunk(index=index, start_token=100 * index, num_tokens=100, instance_ids=())
        for index in range(3)
    )
    run = replace(run_prefill(request, pair.decode.member), chunks=chunks)
    pair.decode.role.on_command(admit_decode(request))
    pair.prefill.role.on_command(run)
    await pair.over("r")

    finished = [
        (m.chunk_index, m.last, m.compute_s > 0)
        for kind, m in pair.prefill.messages
        if kind == "chunk_finished" and m.request_id == "r"
    ]
    assert finished == [(0, False, False), (1, False, False), (2, True, True)]
    assert pair.computed("r") == [(256, 44)]
    assert pair.tokens["r", 0] == pair.tokens["first", 0]


async def test_who_asks_for_the_prompts_logprobs_gets_all_of_them(pair: Pair) -> None:
    ids = prompt(200)
    await pair.answer("first", ids)
    await pair.answer("echo", ids, prompt_logprobs=0)
    assert pair.cached("echo") == 0
    assert pair.computed("echo") == [(0, 200)]


async def test_nothing_is_shared_without_need(pair: Pair) -> None:
    """Covers other salts, other block sizes, and requests that opt out of caching."""
    ids = prompt(200)
    await pair.answer("first", ids)
    others = {
        "salted": with_blocks(spec("salted", 200), ids, salt="tenant"),
        "sized": with_blocks(spec("sized", 200), ids, block=32),
        "alone": spec("alone", 200),
    }
    for name, request in others.items():
        await remember(pair.store, request, ids)
        pair.send(request)
        await pair.over(name)
        assert pair.cached(name) == 0, name
        assert pair.tokens[name, 0] == pair.tokens["first", 0]
    assert len(pair.prefill.role.prefix_cache) == 6  # three of `first`, three of `salted`


async def test_a_cancelled_prompt_leaves_nothing(pair: Pair) -> None:
    request = await pair.request("r", prompt(600))
    with pair.prefill.held_before_the_last_chunk():
        pair.send(request)
        await eventually(lambda: pair.prefill.kinds("r"))
        pair.prefill.cancel("r")
    await pair.prefill.said("request_released", "r")
    pair.decode.cancel("r")
    assert not len(pair.prefill.role.prefix_cache)


async def test_a_cancelled_prompt_that_was_cached_frees_what_it_shared(pair: Pair) -> None:
    ids = prompt(300)
    await pair.answer("first", ids)
    request = await pair.request("r", ids)
    with pair.prefill.held_before_the_last_chunk():
        pair.send(request)
        await eventually(lambda: pair.prefill.kinds("r"))
        assert pair.prefill.engine.pool.used_pages == 19
        pair.prefill.cancel("r")
    await pair.prefill.said("request_released", "r")
    pair.decode.cancel("r")
    assert pair.prefill.engine.pool.used_pages == 0
    assert await pair.answer("again", ids) == pair.tokens["first", 0]
    assert pair.cached("again") == 256


async def test_requests_take_the_pages_that_idle(pair: Pair) -> None:
    pool = pair.prefill.engine.pool
    held = pool.allocate(pool.free_pages - 25)
    ids = {seed: prompt(300, seed) for seed in range(3)}
    for seed, prompt_ids in ids.items():
        answer = await pair.answer(f"r{seed}", prompt_ids)
        assert answer == oracle("llama").greedy(prompt_ids, 8)
    assert pool.idle_pages > 0
    assert await pair.answer("last", ids[2]) == pair.tokens["r2", 0]
    assert pair.cached("last") == 256
    assert await pair.answer("gone", ids[0]) == pair.tokens["r0", 0]
    assert pair.cached("gone") == 0
    pool.free(held)


async def test_requests_that_wait_for_pages_share_in_the_end(pair: Pair) -> None:
    ids = prompt(300)
    await pair.answer("first", ids)
    pool = pair.prefill.engine.pool
    held = pool.allocate(pool.free_pages - 2)  # most of the cache is evicted
    pair.send(await pair.request("r", ids))
    await asyncio.sleep(0.05)
    assert not pair.prefill.kinds("r")
    pool.free(held)
    pair.prefill.role.on_command(order("r"))
    await pair.over("r")
    assert pair.tokens["r", 0] == pair.tokens["first", 0]


async def test_the_scheduler_hears_what_is_there(pair: Pair) -> None:
    listener = CacheView(pair.prefill)
    assert registration(pair.prefill).block_tokens == 64
    assert listener.hear() == set()
    ids = prompt(200)
    await pair.answer("first", ids)
    blocks = (await pair.request("other", ids)).prefix_hashes
    assert listener.hear(beats=False) == set(blocks)  # before the next heartbeat
    assert not pair.prefill.role.cached_blocks()
    pool = pair.prefill.engine.pool
    pool.free(pool.allocate(pool.free_pages))
    assert listener.hear() == set()
    await pair.answer("again", ids)
    listener.hear()
    again = CacheView(pair.prefill)  # another scheduler
    registration(pair.prefill)
    assert again.hear() == listener.blocks == set(blocks)


async def test_a_cache_that_is_off_keeps_nothing() -> None:
    async with live_pair(config(max_chunk_tokens=256, max_batch=4, prefix_cache="off")) as pair:
        listener = CacheView(pair.prefill)
        assert registration(pair.prefill).block_tokens == 0
        ids = prompt(200)
        for name in ("first", "again"):
            await pair.answer(name, ids)
        assert pair.cached("again") == 0
        assert not listener.hear()


async def test_cached_tokens_go_to_every_holder_of_a_spread_prompt() -> None:
    settings = config(max_chunk_tokens=64)
    store, hub, ids = MemoryStore(settings.store), MemoryHub(), prompt(500)
    prefill = LiveRole(PrefillRole, settings, name="prefill-0", hub=hub, store=store)
    made = prefill.engine.layout
    async with holders(2, hub, made, settings.transfer) as (owner, other), live_roles(prefill):

        async def compute(name: str, *shards: tuple[Holder, int, int]) -> np.ndarray:
            request = with_blocks(spec(name, 500), ids)
            await remember(store, request, ids)
            for holder, start, end in shards:
                holder.admit(name, 500, (start, end))
            if not shards:
                owner.admit(name, 500)
            told = tuple(
                KvShard(worker=holder.member, start_token=start, end_token=end + 100 * (end == 500))
                for holder, start, end in shards
            )
            prefill.role.on_command(run_prefill(request, owner.member, shards=told))
            held = [holder for holder, *_ in shards] or [owner]
            return np.concatenate([await holder.kv(name) for holder in held], axis=3)

        whole = await compute("whole")
        spread = await compute("spread", (owner, 0, 130), (other, 130, 500))
        assert [owner.finished[name].cached_tokens for name in ("whole", "spread")] == [0, 448]
        assert (spread[..., :448, :] == whole[..., :448, :]).all()
        assert np.allclose(spread, whole, atol=1e-5)
        assert owner.finished["spread"].first_tokens == owner.finished["whole"].first_tokens
        await prefill.said("request_released", "spread")
