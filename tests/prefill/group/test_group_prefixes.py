"""The prefixes that groups, and prompts after kept tokens, leave in the caches."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.kv.sp_layout import PAD, layout
from millrace.core.request import Chunk
from millrace.prefill.job import PrefillJob
from millrace.prefill.prefix import PromptPrefixes, leading_pages
from support.deadlines import eventually
from support.prefill_group import Group, Plan, group_of
from support.role_pair import BLOCK, SHARING, live_pair, with_blocks
from support.tiny_models import oracle, prompt
from support.worker_roles import config, remember, spec

PAGE = 16


async def ask(group: Group, name: str, plan: Plan) -> list[int]:
    """Computes a prompt that shares its blocks; returns the answer when nothing is held."""
    ids = prompt(sum(tokens for tokens, _ in plan))
    request = with_blocks(spec(name, len(ids)), ids)
    await remember(group.store, request, ids)
    group.admit(request)
    group.run(request, plan)
    answer = await group.tokens(name)
    await group.idle()
    return answer


def hashes(tokens: int) -> list[int]:
    return block_hashes(array("i", prompt(tokens)), BLOCK, prefix_root(BLOCK))


def cached(group: Group, tokens: int) -> list[int]:
    """Counts the prompt's first tokens that each instance has cached; checks integrity, too."""
    found = []
    for role in group.prefills:
        role.role.check_integrity()
        found.append(role.role.prefix_cache.holds(hashes(tokens)) * BLOCK)
    return found


def landed(group: Group) -> int:
    """Counts the tokens of request r that decode has, by its reports."""
    said = [m for kind, m in group.decode.messages if kind == "prefix_landed"]
    return max((m.tokens for m in said if m.request_id == "r"), default=0)


def kept_kv(group: Group, instance: int, tokens: int) -> torch.Tensor:
    """Returns [layers, 2, heads, tokens, dim] of the blocks that the instance has."""
    role = group.prefills[instance]
    pages = role.role.prefix_cache.take(hashes(tokens))
    kv = role.engine.pool.storage[:, pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4).clone()
    role.engine.pool.free(pages)
    return kv


async def test_what_follows_tokens_that_decode_kept_is_kept_with_them() -> None:
    ids = prompt(400)
    expected = oracle("llama").greedy(ids, 8)
    async with live_pair(SHARING) as pair:
        assert await pair.answer("first", ids[:300]) == oracle("llama").greedy(ids[:300], 8)
        pool = pair.prefill.engine.pool
        pool.free(pool.allocate(pool.free_pages))  # prefill forgets
        assert await pair.answer("turn", ids, kept=256) == expected
        assert await pair.answer("again", ids) == expected
        assert pair.computed("turn") == [(256, 144)]
        assert pair.computed("again") == [(384, 16)]


async def test_blocks_that_are_there_already_stay_when_decode_gives_them_again() -> None:
    ids = prompt(400)
    async with live_pair(SHARING) as pair:
        await pair.answer("first", ids[:300])
        cache, pool = pair.prefill.role.prefix_cache, pair.prefill.engine.pool
        before = cache.take(hashes(300))
        pool.free(before)
        await pair.answer("turn", ids, kept=256)
        after = cache.take(hashes(400))
        pool.free(after)
        assert before == after[: len(before)]
        assert len(pair.prefill.role.prefix_cache) == 6


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        pytest.param([(300, [0]), (600, [0, 1])], 256, id="a page that is not full ends it"),
        pytest.param([(320, [0]), (600, [0, 1])], 448, id="and the front shard of the next pass"),
        pytest.param([(900, [0, 1])], 192, id="the front shard alone"),
        pytest.param([(64, [0]), (96, [0]), (700, [0, 1, 2])], 256, id="chunks one after another"),
        pytest.param([(60, [0, 1])], 0, id="no block is whole"),
    ],
)
async def test_the_leader_keeps_the_prompts_beginning(plan: Plan, left: int) -> None:
    tokens = sum(count for count, _ in plan)
    async with group_of(3, config(max_chunk_tokens=450)) as group:
        expected = oracle("llama").greedy(prompt(tokens), 8)
        assert await ask(group, "together", plan) == expected
        assert cached(group, tokens) == [left, 0, 0]
        assert not any(len(role.role.prefix_cache) for role in group.prefills[1:])

        assert await ask(group, "again", [(tokens, [0])]) == expected
        text = group.prefills[0].registry.render()[0].decode()
        assert f"millrace_prefill_cached_tokens_total {float(left)}" in text


async def test_pages_that_the_leader_gave_away_are_its_own_to_keep() -> None:
    """Cache balancing copies them: half of the first chunk is at the other member, too."""
    async with group_of(2, config(max_chunk_tokens=256)) as group:
        await ask(group, "together", [(640, [1]), (256, [1, 0])])
        assert cached(group, 896) == [0, 704]
        await ask(group, "alone", [(896, [0])])
        alone, left = kept_kv(group, 0, 896), kept_kv(group, 1, 896)
        assert torch.allclose(left, alone[..., :704, :], atol=1e-5)


async def test_any_plan_leaves_what_one_alone_would() -> None:
    rng = random.Random(11)
    async with group_of(4, config(max_chunk_tokens=128)) as group:
        for number in range(8):
            tokens, size, plan = 0, 1, []
            order = rng.sample(range(3), 3)
            for _ in range(rng.randint(1, 3)):
                count = rng.choice([16 * rng.randint(1, 20), rng.randint(1, 300)])
                size = rng.randint(size, 3)
                plan.append((count, order[:size]))
                tokens += count
            pools = [role.engine.pool for role in group.prefills]
            for pool in pools:
                pool.free(pool.allocate(pool.free_pages))
            expected = await ask(group, f"{number}-alone", [(tokens, [3])])
            assert await ask(group, f"{number}-together", plan) == expected, plan
            whole = kept_kv(group, 3, tokens)
            for instance, found in enumerate(cached(group, tokens)[:3]):
                if found:
                    left = kept_kv(group, instance, tokens)
                    assert torch.allclose(left, whole[..., :found, :], atol=1e-4), plan
                    again = await ask(group, f"{number}-{instance}", [(tokens, [instance])])
                    assert again == expected


@pytest.mark.parametrize(("members", "left"), [([1, 0], 1), ([2], 2)])
async def test_what_decode_wrote_back_is_kept_by_the_next_attempts_leader(
    members: list[int], left: int
) -> None:
    tokens = 2000
    async with group_of(3, config(max_chunk_tokens=64)) as group:
        expected = oracle("llama").greedy(prompt(tokens), 8)
        ids = prompt(tokens)
        request = with_blocks(spec("r", tokens), ids)
        await remember(group.store, request, ids)
        with group.prefills[0].held_before_the_last_chunk():
            group.admit(request)
            group.run(request, [(tokens, [0, 1])])
            await eventually(lambda: landed(group) >= 1000)
            for role in group.prefills[:2]:
                role.cancel("r")
        await group.idle()
        assert cached(group, tokens) == [0, 0, 0]
        kept = landed(group)
        group.admit(request, attempt=2, kept=kept)
        group.run(request, [(tokens - kept, members)], attempt=2, start=kept)
        assert await group.tokens("r") == expected
        await group.idle()
        found = cached(group, tokens)
        if len(members) > 1:  # half of the fetched tokens, whole pages
            assert found.pop(left) == -(-kept // PAGE // 2) * PAGE // BLOCK * BLOCK
        else:
            assert found.pop(left) == tokens // BLOCK * BLOCK
        assert not any(found)
        assert await ask(group, "again", [(tokens, [left])]) == expected


async def test_a_group_that_falls_apart_leaves_nothing() -> None:
    async with group_of(2, config(max_chunk_tokens=64)) as group:
        ids = prompt(2000)
        request = with_blocks(spec("r", 2000), ids)
        await remember(group.store, request, ids)
        group.admit(request)
        group.run(request, [(640, [0]), (1360, [0, 1])])
        await group.prefills[0].said("chunk_finished", "r")
        group.prefills[1].cancel("r")
        await group.prefills[0].said("request_failed", "r")
        await group.idle()
        group.decode.cancel("r")
        assert cached(group, 2000) == [0, 0]
        assert all(role.engine.pool.used_pages == 0 for role in group.prefills)


async def test_what_a_group_computed_while_it_ended_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an abort ends a wait, compute runs with missing rows until it sees the abort."""
    keep = PromptPrefixes.keep

    def ended_meanwhile(prefixes: PromptPrefixes, job: PrefillJob) -> None:
        if job.leads:
            job.link.abort()
        keep(prefixes, job)

    monkeypatch.setattr(PromptPrefixes, "keep", ended_meanwhile)
    async with group_of(2, config(max_chunk_tokens=256)) as group:
        ids = prompt(900)
        request = with_blocks(spec("r", 900), ids)
        await remember(group.store, request, ids)
        group.admit(request)
        group.run(request, [(320, [0]), (580, [0, 1])])
        await group.prefills[0].said("request_released", "r")
        group.prefills[1].cancel("r")
        group.decode.cancel("r")
        await group.idle()
        assert cached(group, 900) == [0, 0]


@pytest.mark.parametrize("start", [0, 40, 160])
def test_leading_pages_are_all_that_lie_as_one_alone_would_have_them(start: int) -> None:
    rng = random.Random(start)
    for _ in range(60):
        chunks, size, at = [], 1, start
        for index in range(rng.randint(1, 4)):
            tokens, size = rng.randint(1, 300), rng.randint(size, 4)
            members = tuple("abcd"[:size])
            chunks.append(
                Chunk(index=index, start_token=at, num_tokens=tokens, instance_ids=members)
            )
            at += tokens
        found = layout(chunks, PAGE, 64)
        for member in found.members:
            runs = [*found.fetched.get(member, ()), *found.computed(member)]
            slots = [PAD] * (found.pages[member] * PAGE)
            for run in runs:
                for offset in range(run.num_tokens):
                    slots[run.slot + offset] = run.start_token + offset
            rows = [slots[page * PAGE : (page + 1) * PAGE] for page in range(found.pages[member])]
            expected = []
            while (want := list(range(len(expected) * PAGE, (len(expected) + 1) * PAGE))) in rows:
                expected.append(rows.index(want))
            assert leading_pages(runs, PAGE) == expected
