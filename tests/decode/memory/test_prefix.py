"""A decode instance keeps the KV of prompts and answers for requests that begin with them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.deadlines import eventually
from support.role_pair import SHARING, CacheView, Pair, live_pair
from support.tiny_models import oracle, prompt
from support.worker_roles import admit_decode, config, registration


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with live_pair(SHARING) as made:
        yield made


def forget(pair: Pair) -> None:
    """Evicts prefill's own cache."""
    pool = pair.prefill.engine.pool
    pool.free(pool.allocate(pool.free_pages))


async def test_a_request_begins_with_what_an_earlier_one_left(pair: Pair) -> None:
    ids = prompt(300)
    expected = oracle("llama").greedy(ids, 8)
    assert await pair.answer("first", ids) == expected
    forget(pair)
    assert await pair.answer("again", ids, kept=256) == expected
    assert pair.cached("again") == 256
    assert pair.computed("again") == [(256, 44)]
    cached = pair.span("again", "cached")
    assert (cached.instance_id, cached.attributes["tokens"]) == ("decode-0", "256")
    text = pair.decode.registry.render()[0].decode()
    assert "millrace_decode_cached_tokens_total 256.0" in text


async def test_the_next_turn_of_a_conversation_begins_behind_the_answer(pair: Pair) -> None:
    """Prompt and answer end within blocks; the last token of the answer has no KV."""
    ids = prompt(100)
    answer = await pair.answer("first", ids, max_tokens=93)
    turn = ids + answer + prompt(40, seed=1)
    listener = CacheView(pair.decode)
    kept = [h in listener.hear() for h in (await pair.request("probe", turn)).prefix_hashes]
    assert kept == [True, True, True]  # 192 of 193 tokens

    second = await pair.answer("second", turn, kept=192)
    assert second == oracle("llama").greedy(turn, 8)
    assert pair.cached("second") == 192


async def test_a_short_prompt_and_its_answer_are_kept_too(pair: Pair) -> None:
    ids = prompt(20)
    answer = await pair.answer("first", ids, max_tokens=60)
    turn = ids + answer + prompt(30, seed=1)
    assert await pair.answer("second", turn, kept=64) == oracle("llama").greedy(turn, 8)


async def test_answers_with_penalties_and_several_choices(pair: Pair) -> None:
    """Of several choices, only choice 0's answer is kept. Shared pages are never written."""
    sampling = {
        **{"n": 3, "temperature": 1.1, "seed": 11, "max_tokens": 60},
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    }
    ids = prompt(75)
    await pair.answer("first", ids, **sampling)
    await eventually(lambda: len(pair.ends) == 3)
    turn = ids + pair.tokens["first", 0] + prompt(40, seed=1)
    await pair.answer("plain", turn, **sampling)
    await pair.answer("kept", turn, kept=128, **sampling)
    await pair.answer("more", turn, kept=128, **sampling)
    await eventually(lambda: len(pair.ends) == 12)
    for choice in range(3):
        assert pair.tokens["kept", choice] == pair.tokens["plain", choice]
        assert pair.tokens["more", choice] == pair.tokens["plain", choice]


async def test_several_requests_share_pages_at_once(pair: Pair) -> None:
    ids = prompt(200)
    expected = await pair.answer("first", ids, max_tokens=40)
    for i in range(3):
        pair.send(await pair.request(f"r{i}", ids, max_tokens=40), kept=192)
    assert pair.used_pages == 12 + 3 * 3
    pair.decode.role.prefix_cache.check_integrity()
    for i in range(3):
        await pair.over(f"r{i}")
        assert pair.tokens[f"r{i}", 0] == expected


@pytest.mark.parametrize("kept", [256, 192, 100])
async def test_what_is_not_there_cannot_be_kept(pair: Pair, kept: int) -> None:
    """Kept tokens that were evicted, never cached, or are no whole blocks."""
    await pair.answer("first", prompt(200))
    pool = pair.decode.engine.pool
    if kept == 192:
        pool.free(pool.allocate(pool.free_pages))
    request = await pair.request("r", prompt(200))
    pair.decode.role.on_command(admit_decode(request, kept_tokens=kept))
    assert pair.decode.kinds("r") == ["request_failed", "request_released"]
    failed = await pair.decode.said("request_failed", "r")
    assert failed.retryable and not failed.kept_tokens
    assert pair.used_pages == 0


async def test_no_room_for_the_rest_gives_back_what_was_taken(pair: Pair) -> None:
    ids = prompt(200)
    await pair.answer("first", ids)
    pool = pair.decode.engine.pool
    request = await pair.request("r", ids)
    taken = pair.decode.role.prefix_cache.take(request.prefix_hashes[:3])
    held = pool.allocate(pool.free_pages)
    pool.free(taken)
    pair.decode.role.on_command(admit_decode(request, kept_tokens=192))
    assert pair.decode.kinds("r") == ["request_failed", "request_released"]
    assert pair.used_pages == len(held)
    pool.free(held)
    assert await pair.answer("again", ids, kept=192) == pair.tokens["first", 0]


async def test_a_cancelled_answer_leaves_what_was_computed(pair: Pair) -> None:
    ids = prompt(100)
    pair.send(await pair.request("r", ids, max_tokens=500))
    await eventually(lambda: len(pair.tokens.get(("r", 0), [])) > 100)
    pair.decode.cancel("r")
    await pair.decode.said("request_released", "r")
    told = pair.tokens["r", 0]
    turn = ids + told[:93] + prompt(20, seed=1)
    assert await pair.answer("next", turn, kept=192) == oracle("llama").greedy(turn, 8)


async def test_a_prompt_that_did_not_land_leaves_nothing(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        pair.send(await pair.request("r", prompt(600)))
        await pair.decode.said("prefix_landed", "r")
        pair.decode.cancel("r")
        await pair.decode.said("request_released", "r")
    await pair.prefill.said("request_released", "r")
    assert not CacheView(pair.decode).hear()


async def test_an_attempt_that_fails_behind_cached_tokens_is_gone_on_from(
    pair: Pair,
) -> None:
    ids = prompt(900)
    await pair.answer("first", ids)
    forget(pair)
    with pair.prefill.held_before_the_last_chunk():
        request = await pair.request("r", ids)
        pair.send(request, kept=256)
        await pair.decode.said("prefix_landed", "r")
        pair.prefill.cancel("r")
        failed = await pair.decode.said("request_failed", "r")
        assert failed.kept_tokens > 256
    await pair.prefill.said("request_released", "r")
    pair.decode.cancel("r")
    await pair.decode.said("request_released", "r")
    assert pair.used_pages == 0
    assert await pair.answer("again", ids, kept=256) == pair.tokens["first", 0]


async def test_the_scheduler_hears_what_is_there(pair: Pair) -> None:
    listener = CacheView(pair.decode)
    assert registration(pair.decode).block_tokens == 64
    assert listener.hear() == set()
    ids = prompt(200)
    await pair.answer("first", ids)
    blocks = (await pair.request("other", ids)).prefix_hashes
    assert listener.hear(beats=False) == set(blocks)  # before the next heartbeat


@pytest.mark.slow
async def test_ranks_share_the_book_of_cached_pages() -> None:
    """A page number names the same page of every rank."""
    async with live_pair(config(max_chunk_tokens=256, max_batch=4, tensor_parallel=2)) as pair:
        ids = prompt(300)
        first = await pair.answer("first", ids, max_tokens=30)
        assert first == oracle("llama").greedy(ids, 30)
        assert await pair.answer("again", ids, max_tokens=30) == first
        assert pair.cached("again") == 256
        turn = ids + first
        assert await pair.answer("turn", turn, kept=320) == oracle("llama").greedy(turn, 8)
