"""A group of instances computes the same as one instance, for any cut and spread of its prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from millrace.core.kv.sp_layout import PAD
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.loader import load_model
from support.ring_group import Member, RingGroup, plan
from support.tiny_engine import Request, make_pool, prefill
from support.tiny_models import VARIANTS, model_folder, prompt

SIZES = [(name, (1, 2, 3, 4)) for name in VARIANTS] + [("qwen3", (2, 4)), ("mistral-window", (3,))]


def make_runners(
    folder: Path, count: int, *, page_tokens: int = 8, tokens: int = 1024, dtype: str = "float32"
) -> list[ModelRunner]:
    """Makes instances that share their weights, each with room for so many tokens."""
    model = load_model(folder, device="cpu", dtype=dtype)
    pages = tokens // page_tokens
    return [
        ModelRunner(StagePasses(model, make_pool(model, page_tokens=page_tokens, num_pages=pages)))
        for _ in range(count)
    ]


def alone(runner: ModelRunner, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns logits, and the K/V [layers, 2, heads, tokens, head_dim], of one instance in one
    pass.
    """
    request = Request(runner, tokens)
    logits = prefill(runner, request)
    pages = runner.pool.storage[:, request.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    kv = pages[:, :, :, : len(tokens)].float()
    runner.pool.free(request.pages)
    return logits, kv


def hidden_alone(runner: ModelRunner, tokens: Sequence[int]) -> Tensor:
    task = Request(runner, tokens).task(0, len(tokens))
    task.want_hidden = True
    for _ in runner.prefill_batch([task]):
        pass
    assert task.hidden is not None
    return task.hidden


def small_group(sizes: Sequence[int], tokens: int, ends: Sequence[int] = ()) -> RingGroup:
    rng = random.Random(tokens)
    return RingGroup(
        make_runners(model_folder("llama"), max(sizes)),
        plan(rng, tokens, sizes, ends),
        prompt(tokens),
        max_chunk_tokens=16,
        rng=rng,
    )


@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_any_plan_gives_the_logits_and_the_kv_of_one_pass(
    name: str, sizes: tuple[int, ...]
) -> None:
    rng = random.Random(f"{name} {sizes}")
    tokens = prompt(rng.randrange(70, 230), seed=len(name))
    runners = make_runners(model_folder(name), sizes[-1], page_tokens=rng.choice((4, 8, 16)))
    logits, kv = alone(runners[0], tokens)
    group = RingGroup(
        runners,
        plan(rng, len(tokens), sizes),
        tokens,
        max_chunk_tokens=rng.choice((9, 32, 64)),
        rng=rng,
    )
    ringed = group.run()
    assert_close(ringed, logits, rtol=1e-4, atol=1e-4)
    assert ringed.argmax() == logits.argmax()
    assert_close(group.kv()[0], kv, rtol=1e-4, atol=1e-4)
    group.free()
    for runner in runners:
        runner.pool.check_integrity(expected_used=0)


@pytest.mark.parametrize("last", [1, 2, 3, 5])
def test_members_without_tokens_serve_the_ring(last: int) -> None:
    """Fewer tokens than members, over history that all hold."""
    group = small_group((2, 4, 4), 61 + last, (20, 61, 61 + last))
    logits, kv = alone(group.members[0].runner, group.prompt_ids.tolist())
    assert_close(group.run(), logits, rtol=1e-4, atol=1e-4)
    assert_close(group.kv()[0], kv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "mistral-window"])
def test_suspended_anywhere_with_other_prompts_in_between(name: str) -> None:
    rng = random.Random(name)
    tokens, other = prompt(150), prompt(40, seed=9)
    runners = make_runners(model_folder(name), 3)
    (logits, _), (other_logits, _) = (alone(runners[0], ids) for ids in (tokens, other))
    stops: list[Boundary] = []

    def between(member: Member, boundary: Boundary) -> None:
        if rng.random() < 0.3:
            stops.append(boundary)
            found, _ = alone(member.runner, other)
            assert_close(found, other_logits, rtol=1e-4, atol=1e-4)

    group = RingGroup(
        runners, plan(rng, 150, (2, 3)), tokens, max_chunk_tokens=25, rng=rng, between=between
    )
    assert_close(group.run(), logits, rtol=1e-4, atol=1e-4)
    assert {stop.operator for stop in stops} >= {"qkv_proj", "attn", "o_proj"}


def test_bfloat16_agrees_within_its_rounding() -> None:
    tokens, rng = prompt(120), random.Random(3)
    runners = make_runners(model_folder("qwen3"), 3, dtype="bfloat16")
    logits, _ = alone(runners[0], tokens)
    group = RingGroup(runners, plan(rng, 120, (1, 3)), tokens, max_chunk_tokens=50, rng=rng)
    assert (group.run() - logits).abs().max() < 0.05 * logits.abs().max()


def test_hidden_states_of_every_position_come_from_who_computed_them() -> None:
    group = small_group((1, 2, 3), 101, (40, 99, 101))
    wanted = hidden_alone(group.members[0].runner, group.prompt_ids.tolist())
    group.want_hidden = True
    group.run()
    found = torch.stack([group.hidden[position] for position in range(101)])
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_last_layer_goes_round_only_for_rows_that_somebody_wants() -> None:
    seen: list[tuple[Member, Boundary]] = []
    group = small_group((3,), 75)
    group.between = lambda member, boundary: seen.append((member, boundary))
    group.run()
    (ring,) = group.rings
    assert [tasks[0].last_layer for tasks in ring.tasks] == [False, True]
    exchanged = [layer for _, layer in ring.turns()]
    assert exchanged == [0, 1, 0, 1, 2]
    assert ring.sent == [(5, 1)] * 3  # every member passed all of it on
    leader, *others = ([b for m, b in seen if m is member] for member in group.members)
    assert others[0] == others[1] == leader[: len(others[0])]
    assert others[0][-1] == Boundary(2, "attn")
    rest = [(b.layer, b.operator) for b in leader[len(others[0]) :]]
    assert rest == [(2, "o_proj"), (2, "gate_up_proj"), (2, "down_proj"), (3, "lm_head")]


def test_a_ring_of_one_is_the_plain_pass() -> None:
    rng, tokens = random.Random(1), prompt(90)
    runners = make_runners(model_folder("qwen2-yarn-window"), 1)
    logits, _ = alone(runners[0], tokens)
    group = RingGroup(runners, plan(rng, 90, (1,)), tokens, max_chunk_tokens=90, rng=rng)
    _, ((task,),) = group.ring(group.layout.chunks[0])
    list(runners[0].prefill_ring(task))
    assert task.logits is not None
    assert_close(task.logits, logits, rtol=1e-5, atol=1e-5)


def test_an_abort_ends_the_pass_without_an_error() -> None:
    group = small_group((2,), 30)
    ring, ((task, _),) = group.ring(group.layout.chunks[0])
    runner = group.members[0].runner
    steps = runner.prefill_ring(task)
    assert [next(steps).operator for _ in range(2)] == ["embed", "qkv_proj"]
    ring.abort()
    assert len(list(steps)) == len(runner.passes.operators) - 2
    group.free()
    runner.pool.check_integrity(expected_used=0)


def test_the_task_of_each_member_of_a_pass() -> None:
    group = small_group((1, 3), 100, (41, 100))
    (pool,) = {member.runner.pool.layout for member in group.members}
    shares = group.layout.chunks[1]
    ring, passes = group.ring(shares)
    computed = torch.cat([task.positions for tasks in passes for task in tasks])
    assert computed.sort().values.tolist() == list(range(41, 100))
    for number, tasks in enumerate(passes):
        here = [_held(task) for task in tasks]
        end = shares.passes[number].start_token + shares.passes[number].num_tokens
        assert sorted(token for held in here for token in held) == list(range(end))
        for rank, (member, task) in enumerate(zip(ring.members, tasks, strict=True)):
            assert task.token_ids.tolist() == group.prompt_ids[task.positions].tolist()
            _check_slots(task, pool.page_tokens)
            for step, block in enumerate(task.blocks):
                assert block.positions.tolist() == tasks[rank - step].blocks[0].positions.tolist()
                if step:
                    flat = block.pages % pool.num_pages
                    assert set(flat.tolist()) <= set(member.buffers[(step - 1) % 2])
                    assert len(set(block.pages.tolist())) == len(block.pages)


def _held(task: RingTask) -> list[int]:
    return [token for token in task.blocks[0].positions.tolist() if token != PAD]


def _check_slots(task: RingTask, page_tokens: int) -> None:
    """A token is written where its member's block says that it is."""
    own = task.blocks[0]
    at = {
        int(own.pages[slot // page_tokens]) * page_tokens + slot % page_tokens: token
        for slot, token in enumerate(own.positions.tolist())
    }
    assert [at[slot] for slot in task.slots.tolist()] == task.positions.tolist()


def test_tasks_that_make_no_sense_are_refused() -> None:
    group = small_group((2,), 30)
    runner = group.members[0].runner
    _, ((task, _),) = group.ring(group.layout.chunks[0])
    task.last_layer = False
    with pytest.raises(ValueError, match="15 tokens with last_layer False wants rows"):
        runner.prefill_ring(task)
    task.last_layer, task.blocks = True, task.blocks[:1]
    with pytest.raises(ValueError, match="blocks are 1, the ring's members 2"):
        runner.prefill_ring(task)
    task.slots = task.slots[:3]
    with pytest.raises(ValueError, match=r"slots is torch.int64 \(3,\), not int64 \(15,\)"):
        runner.prefill_ring(task)


@pytest.mark.slow
def test_a_long_prompt_over_three_instances() -> None:
    folder = Path(__file__).parents[3] / "models" / "millrace-tiny"
    rng, tokens = random.Random(16), [5 + (i * i * 31 + i) % 1500 for i in range(16_000)]
    runners = make_runners(folder, 3, page_tokens=16, tokens=24_000)
    logits, kv = alone(runners[0], tokens)
    group = RingGroup(runners, plan(rng, 16_000, (1, 2, 3)), tokens, max_chunk_tokens=2048, rng=rng)
    ringed = group.run()
    assert_close(ringed, logits, rtol=1e-4, atol=1e-4)
    assert ringed.argmax() == logits.argmax()
    assert_close(group.kv()[0], kv, rtol=1e-4, atol=1e-4)
