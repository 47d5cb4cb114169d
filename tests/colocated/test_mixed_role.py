"""A mixed instance: its computation and its reports; after a release, nothing is held."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from millrace.colocated.packing import packing_config
from millrace.colocated.predictor import Predictor
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.request import Slo
from millrace.core.scheduler.commands import Drain, PolicyInForce, Registered
from support.deadlines import HANG_S, eventually
from support.mixed_role import Mixed, mixed_config, mixed_instance, operators
from support.tiny_models import oracle, prompt
from support.worker_roles import admit_decode, registration, run_prefill, spec

SMALL_CHUNKS = {"min_chunk_tokens": 8, "chunk_step_tokens": 8, "t_target_ms": 1.0}


async def test_a_whole_life() -> None:
    async with mixed_instance(mixed_config()) as mixed:
        await mixed.ask("r", 37, max_tokens=12)
        finished = await mixed.live.said("request_finished", "r")
        assert (finished.reason, finished.generated_tokens) == ("length", 12)
        assert mixed.live.kinds("r") == [
            "chunk_started",
            "chunk_finished",
            "decode_started",
            "request_finished",
        ]
        expected = oracle("llama").greedy(prompt(37), 12)
        assert await mixed.answered("r") == expected
        assert mixed.used_pages == 0
        names = [span.name for span in mixed.spans("r")]
        assert names == ["queued", "waiting", "chunk 0", "first_decode_step"]
        await eventually(lambda: journalled(mixed, "r", expected))


async def journalled(mixed: Mixed, name: str, expected: list[int]) -> bool:
    return bool((await mixed.store.journal(name, 0)).tolist() == expected)


@pytest.mark.parametrize("chunking", ["adaptive", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-moe-mixed"])
async def test_random_arrivals_give_the_oracles_tokens(name: str, chunking: str) -> None:
    chance = random.Random(f"{name} {chunking}")
    settings = mixed_config(
        {**SMALL_CHUNKS, "t_target_ms": 5.0, "chunking": chunking, "static_chunk_tokens": 48},
        max_chunk_tokens=128,
        max_batch=6,
    )
    prompts = [prompt(chance.randint(1, 300), seed=n) for n in range(10)]
    async with mixed_instance(settings, name=name) as mixed:
        assert registration(mixed.live).adaptive_chunks == (chunking == "adaptive")
        with mixed.slowed(0.01):
            for number, ids in enumerate(prompts):
                await mixed.ask(f"r{number}", len(ids), ids=ids, max_tokens=9)
                await asyncio.sleep(chance.choice((0.0, 0.0, 0.02)))
        for number, ids in enumerate(prompts):
            assert await mixed.answered(f"r{number}") == oracle(name).greedy(ids, 9)
        assert any(plan.shares and plan.shape.decodes for plan in mixed.plans)
        assert any(len(plan.shares) > 1 for plan in mixed.plans)


async def test_chunks_keep_to_t_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 us per token and 1 ns per pair: 2 ms hold fewer tokens as the history grows."""
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 2.0}, max_chunk_tokens=2048)
    model = operators(token_s=1e-5, pair_s=1e-7)
    monkeypatch.setattr(Predictor, "observe", lambda *_: None)  # as it was measured
    async with mixed_instance(settings, model) as mixed:
        await mixed.ask("r", 600, max_tokens=2)
        assert await mixed.answered("r") == oracle("llama").greedy(prompt(600), 2)
        sizes = [plan.shares[0].tokens for plan in mixed.plans if plan.shares]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
        assert all(plan.predicted_s <= 2e-3 or plan.shares[0].tokens == 8 for plan in mixed.plans)


async def test_chunks_keep_to_the_idle_target_while_no_answer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10 us per token: 2 ms hold 200 tokens, the 0.5 ms beside an answer 50."""
    settings = mixed_config(
        {**SMALL_CHUNKS, "t_target_ms": 0.5, "idle_target_ms": 2.0}, max_chunk_tokens=2048
    )
    monkeypatch.setattr(Predictor, "observe", lambda *_: None)
    async with mixed_instance(settings, operators(overhead_s=0.0)) as mixed:
        await mixed.ask("alone", 400, max_tokens=300)
        await eventually(lambda: mixed.tokens.get(("alone", 0)))
        await mixed.ask("beside", 400, max_tokens=2)
        await mixed.live.said("chunk_finished", "beside")
        alone, beside = (
            [
                (share.tokens, plan.t_target_s)
                for plan in mixed.plans
                for share in plan.shares
                if share.prompt.request.id == name
            ]
            for name in ("alone", "beside")
        )
    assert 150 <= alone[0][0] <= 200 and {target_s for _, target_s in alone} == {2e-3}
    assert max(beside)[0] <= 50 and {target_s for _, target_s in beside} == {5e-4}


async def test_the_tightest_objective_of_what_runs_is_t_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode alone is predicted to take 0.1 ms, so nobody could keep 10 us."""
    monkeypatch.setattr(Predictor, "observe", lambda *_: None)
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 50.0})
    async with mixed_instance(settings) as mixed:
        await mixed.ask("free", 20, max_tokens=200)
        await mixed.ask("tight", 20, max_tokens=60, slo=Slo(tbt_s=0.002))
        await mixed.ask("tighter", 20, max_tokens=30, slo=Slo(tbt_s=0.001))
        await mixed.ask("impossible", 20, max_tokens=60, slo=Slo(tbt_s=1e-5))
        await mixed.answered("free")
    seen = [target_s for target_s, _ in groupby(plan.t_target_s for plan in mixed.plans)]
    assert seen[-1] == 0.05 and set(seen) == {0.05, 0.001, 0.002}


async def test_the_pace_of_an_end_to_end_objective_is_t_target() -> None:
    """1,000,000 s for 10^8 tokens: 10 ms each, however late the first comes."""
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 50.0})
    async with mixed_instance(settings) as mixed:
        await mixed.ask("paced", 20, max_tokens=60, slo=Slo(e2e_s=1e6), answer_tokens=1e8)
        await mixed.answered("paced")
    paces = {plan.t_target_s for plan in mixed.plans if plan.shape.decodes}
    assert list(paces) == [pytest.approx(0.01, rel=0.01)]


async def test_a_long_prefill_does_not_stop_decodes() -> None:
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 1.0}, max_chunk_tokens=2048)
    async with mixed_instance(settings) as mixed:
        await mixed.ask("short", 20, max_tokens=300)
        await eventually(lambda: mixed.tokens.get(("short", 0)))
        await mixed.ask("long", 1500, max_tokens=2)
        await mixed.live.said("chunk_finished", "long")
        with_chunks = [plan for plan in mixed.plans if plan.shares][1:]
        assert len(with_chunks) > 10
        assert all(plan.shape.decodes == 1 for plan in with_chunks)


async def test_a_prompt_that_yields_to_others_goes_on_where_it_stopped() -> None:
    settings = replace(
        mixed_config({**SMALL_CHUNKS, "multi_prefill": "off"}, max_chunk_tokens=256),
        scheduler=SchedulerConfig(heartbeat_s=0.1, lease_s=HANG_S, policy="edf"),
    )
    async with mixed_instance(settings) as mixed:
        with mixed.slowed(0.05):
            await mixed.ask("late", 900, slo=Slo(ttft_s=100.0))
            await eventually(lambda: any(plan.shares for plan in mixed.plans))
            await mixed.ask("soon", 60, slo=Slo(ttft_s=1.0))
            assert await mixed.answered("soon") == oracle("llama").greedy(prompt(60), 8)
        assert await mixed.answered("late") == oracle("llama").greedy(prompt(900), 8)
        names = [span.name for span in mixed.spans("late")]
        assert names[:5] == ["queued", "waiting", "chunk 0", "preempted", "chunk 1"]


async def test_a_new_policy_ranks_the_prompts_that_wait() -> None:
    settings = replace(
        mixed_config({**SMALL_CHUNKS, "multi_prefill": "off"}, max_chunk_tokens=32),
        scheduler=SchedulerConfig(heartbeat_s=0.1, lease_s=HANG_S, policy="edf"),
    )
    registered = Registered(heartbeat_s=0.1, policy="fcfs")  # not the configured policy
    async with mixed_instance(settings) as mixed:
        role = mixed.live.role
        role.on_command(registered)
        with mixed.slowed(0.01):
            await mixed.ask("late", 900, slo=Slo(ttft_s=100.0))
            await eventually(lambda: any(plan.shares for plan in mixed.plans))
            await mixed.ask("soon", 60, slo=Slo(ttft_s=1.0))
            await eventually(lambda: mixed.waiting == 2)
            until, before = len(mixed.plans), mixed.live.kinds("soon")
            await eventually(lambda: len(mixed.plans) > until + 2)
            assert before == mixed.live.kinds("soon") == []
            role.on_command(PolicyInForce(name="of_tomorrow"))  # changes nothing
            role.on_command(PolicyInForce(name="edf"))
            await mixed.live.said("chunk_finished", "soon")
            assert "chunk_finished" not in mixed.live.kinds("late")
        assert await mixed.answered("soon") == oracle("llama").greedy(prompt(60), 8)
        assert await mixed.answered("late") == oracle("llama").greedy(prompt(900), 8)


# -- every feature of the API


async def test_choices_share_the_prompt_and_differ() -> None:
    async with mixed_instance(mixed_config(max_batch=4)) as mixed:
        await mixed.ask("r", 37, max_tokens=6, n=3, temperature=0.9, seed=5)
        await mixed.ask("one", 37, max_tokens=6, temperature=0.9, seed=5)
        finished = await mixed.live.said("request_finished", "r")
        await mixed.answered("one")
        assert finished.generated_tokens == 18
        await eventually(lambda: all(("r", choice) in mixed.ends for choice in range(3)))
        answers = [mixed.tokens["r", choice] for choice in range(3)]
        assert len({tuple(answer) for answer in answers}) > 1
        assert answers[0] == mixed.tokens["one", 0]


async def test_penalties_see_the_prompt() -> None:
    ids = prompt(40)
    async with mixed_instance(mixed_config(SMALL_CHUNKS)) as mixed:
        await mixed.ask("r", 40, max_tokens=10, repetition_penalty=3.0)
        answer = await mixed.answered("r")
    plain = oracle("llama").greedy(ids, 10)
    assert answer != plain
    assert len(set(answer)) == 10 and not set(answer) & set(ids)


async def test_logprobs_of_prompt_and_answer() -> None:
    ids = prompt(50)
    async with mixed_instance(mixed_config(SMALL_CHUNKS, max_chunk_tokens=64)) as mixed:
        await mixed.ask("other", 90, max_tokens=30)
        await mixed.ask("r", 50, max_tokens=3, logprobs=2, prompt_logprobs=1)
        await mixed.answered("r")
        first = next(event for event in mixed.events if event.request_id == "r")
        later = [event for event in mixed.events if event.request_id == "r"][1:]
    found = first.detail().prompt_logprobs
    assert len(found) == 50
    assert [one.chosen[0] for one in found[1:]] == ids[1:]
    assert all(len(one.top) == 1 for one in found[1:])
    wanted = oracle("llama").logits(ids)[:-1].log_softmax(-1)
    told = torch.tensor([one.chosen[1] for one in found[1:]])
    expected = wanted[torch.arange(49), torch.tensor(ids[1:])]
    torch.testing.assert_close(told, expected, rtol=1e-3, atol=1e-3)
    assert all(len(event.detail().logprobs[0].top) == 2 for event in (first, *later))


async def test_stop_tokens_end_an_answer_at_once_or_later() -> None:
    expected = oracle("llama").greedy(prompt(37), 12)
    third = expected.index(expected[3])
    async with mixed_instance(mixed_config()) as mixed:
        await mixed.ask("first", 37, max_tokens=12, stop_token_ids=[expected[0]])
        await mixed.ask("third", 37, max_tokens=12, stop_token_ids=[expected[3]])
        assert await mixed.answered("first") == expected[:1]
        assert await mixed.answered("third") == expected[: third + 1]
        assert mixed.ends["first", 0] == mixed.ends["third", 0] == "stop"
        await mixed.live.said("request_finished", "first")
        assert "decode_started" not in mixed.live.kinds("first")


async def test_an_answer_is_continued_token_for_token() -> None:
    """An answer from another instance continues without a change."""
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 11, "presence_penalty": 0.7}
    ids = prompt(30)
    async with mixed_instance(mixed_config(SMALL_CHUNKS)) as mixed:
        await mixed.ask("whole", 30, max_tokens=12, **sampling)
        whole = await mixed.answered("whole")
        request = replace(spec("rest", 35, max_tokens=7, **sampling), resumed_tokens=5)
        await mixed.submit(request, ids + whole[:5])
        assert await mixed.answered("rest") == whole[5:]


async def test_what_prompts_have_in_common_is_computed_once() -> None:
    settings = mixed_config(SMALL_CHUNKS, prefix_block_tokens=16)
    common = prompt(70)
    async with mixed_instance(settings) as mixed:
        cache = mixed.live.role.prefix_cache
        answers = []
        for name, ids in (("a", common), ("b", [*common[:64], 9, 8, 7]), ("c", common)):
            request = replace(
                spec(name, len(ids)),
                prefix_block_tokens=cache.block_tokens,
                prefix_hashes=tuple(hashes(ids, cache.block_tokens)),
            )
            await mixed.submit(request, ids)
            answers.append((ids, await mixed.answered(name)))
        details = [(event.request_id, event.detail()) for event in mixed.events]
        cached = {name: detail.cached_tokens for name, detail in details if detail.cached_tokens}
        assert cached == {"b": 64, "c": 64}
        for ids, answer in answers:
            assert answer == oracle("llama").greedy(ids, 8)


def hashes(ids: list[int], block_tokens: int) -> list[int]:
    from millrace.core.kv.prefix import block_hashes

    return block_hashes(np.array(ids, dtype=np.int32), block_tokens, 1)


# -- ends before the last token


@pytest.mark.parametrize("at", ["fetching", "in line", "prefilling", "decoding"])
async def test_a_cancelled_request_leaves_nothing(at: str) -> None:
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 0.3}, max_chunk_tokens=32)
    async with mixed_instance(settings) as mixed:
        if at == "in line":
            await mixed.ask("before", 900, max_tokens=2)
        await mixed.ask("r", 900, max_tokens=200)
        if at == "prefilling":
            await mixed.live.said("chunk_started", "r")
        elif at == "decoding":
            await mixed.live.said("decode_started", "r")
        mixed.live.cancel("r")
        await mixed.live.said("request_released", "r")
        if at == "in line":
            assert await mixed.answered("before") == oracle("llama").greedy(prompt(900), 2)
        await eventually(lambda: mixed.used_pages == 0)


async def test_without_room_a_request_is_refused_for_another_attempt() -> None:
    async with mixed_instance(mixed_config(kv_bytes=1 << 16, max_batch=2)) as mixed:
        await mixed.ask("long", 4000)
        failed = await mixed.live.said("request_failed", "long")
        assert failed.retryable and "KV pages may be wanted" in failed.message
        await mixed.ask("many", 10, n=3)
        assert "the batch holds 2" in (await mixed.live.said("request_failed", "many")).message
        assert mixed.live.kinds("many")[-1] == "request_released"


async def test_a_prompt_that_is_not_in_the_store_fails_for_another_attempt() -> None:
    async with mixed_instance(mixed_config()) as mixed:
        request = spec("r", 10)
        mixed.live.role.on_command(admit_decode(request))
        mixed.live.role.on_command(run_prefill(request, mixed.live.member))
        assert (await mixed.live.said("request_failed", "r")).retryable
        await mixed.live.said("request_released", "r")


async def test_a_prompt_that_can_not_be_computed_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mixed_instance(mixed_config(SMALL_CHUNKS)) as mixed:
        await mixed.ask("good", 20, max_tokens=40)
        await mixed.live.said("decode_started", "good")
        ids = prompt(30)
        ids[7] = 100_000  # beyond the vocabulary
        await mixed.ask("bad", 30, ids=ids)
        failed = await mixed.live.said("request_failed", "bad")
        assert not failed.retryable and "prefill failed" in failed.message
        assert await mixed.answered("good") == oracle("llama").greedy(prompt(20), 40)


async def test_logits_that_are_not_finite_end_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mixed_instance(mixed_config()) as mixed:
        runner = mixed.live.engine.runner
        whole = runner.mixed

        def broken(decodes: Any, table: Any, tasks: Any) -> torch.Tensor:
            logits = whole(decodes, table, tasks)
            for task in tasks:
                task.logits = torch.full_like(task.logits, float("nan"))
            return logits

        monkeypatch.setattr(runner, "mixed", broken)
        await mixed.ask("r", 20)
        failed = await mixed.live.said("request_failed", "r")
        assert not failed.retryable and "not finite" in failed.message
        assert failed.fault == "compute"


@pytest.mark.parametrize("abort", [False, True])
async def test_an_eviction_moves_answers_and_has_prompts_tried_elsewhere(abort: bool) -> None:
    settings = mixed_config({**SMALL_CHUNKS, "t_target_ms": 0.3}, max_chunk_tokens=32)
    async with mixed_instance(settings) as mixed:
        with mixed.slowed(0.02):
            await mixed.ask("answering", 20, max_tokens=500)
            await mixed.live.said("decode_started", "answering")
            await mixed.ask("prompt", 900)
            await mixed.live.said("chunk_started", "prompt")
            mixed.live.role.on_command(Drain(abort=abort))
        await mixed.live.role.wait_idle()
        assert mixed.used_pages == 0
        if abort:
            assert not (await mixed.live.said("request_failed", "prompt")).retryable
        else:
            await eventually(lambda: mixed.ends.get(("answering", 0)) == "moved")
            assert mixed.live.kinds("prompt")[-1] == "request_released"
            assert mixed.live.kinds("answering")[-1] == "request_finished"


async def test_a_lost_scheduler_costs_all_it_holds_and_it_starts_anew() -> None:
    async with mixed_instance(mixed_config(SMALL_CHUNKS)) as mixed:
        for number in range(4):
            await mixed.ask(f"r{number}", 300, max_tokens=100)
        await eventually(lambda: len(mixed.plans) > 3)
        await mixed.live.role.drop_all("the scheduler's stream was lost")
        assert mixed.used_pages == 0
        mixed.live.role.check_integrity()
        await mixed.ask("new", 33)
        assert await mixed.answered("new") == oracle("llama").greedy(prompt(33), 8)


async def test_what_it_registers_and_reports() -> None:
    async with mixed_instance(mixed_config(max_batch=7)) as mixed:
        told = registration(mixed.live)
        assert (told.role, told.max_batch, told.adaptive_chunks) == ("mixed", 7, True)
        assert 0 < told.kv_pages < mixed.live.engine.pool.num_pages
        assert told.decode_step is not None and told.decode_step.base_s > 0
        await mixed.ask("r", 20, max_tokens=300)
        await mixed.live.said("decode_started", "r")
        assert mixed.live.role.counts() == (1, 0)
        await eventually(lambda: mixed.live.role.heartbeat().tbt_s > 0)
        mixed.live.cancel("r")
        text = mixed.live.registry.render()[0].decode()
        assert "millrace_mixed_measured_to_predicted_ratio_count 1" in text


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_chunk_tokens is 16"):
        packing_config(mixed_config(max_chunk_tokens=16))
    with pytest.raises(ConfigError, match=r"min_chunk_tokens is 33"):
        packing_config(mixed_config({"min_chunk_tokens": 33}))
