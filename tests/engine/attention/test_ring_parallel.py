"""A ring whose members are tensor-parallel groups."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from millrace.engine.forward.passes import Boundary
from millrace.engine.model.communicator import Communicator
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.runner import Runner
from millrace_kernels import determinism
from millrace_kernels.determinism import Alike
from support.deadlines import HANG_S
from support.parallel import open_runner, split_folder
from support.ring_group import Member, RingGroup, plan
from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import prompt


@pytest.fixture(scope="module")
def groups() -> Iterator[list[RankGroup]]:
    ranks = [RankGroup(2, timeout_s=2 * HANG_S) for _ in range(2)]
    yield ranks
    for group in ranks:
        group.close()


def open_runners(groups: list[RankGroup], name: str) -> list[Runner]:
    return [open_runner(group, split_folder(name)) for group in groups]


def test_ranks_wait_for_a_word_longer_than_for_each_other(tmp_path: Path) -> None:
    """A ring stands still while its other members compute something else."""

    def run(rank: int) -> bool:
        ranks = Communicator(
            rank,
            2,
            device=torch.device("cpu"),
            rendezvous=str(tmp_path / "rendezvous"),
            timeout_s=0.5,
        )
        if rank == 0:
            time.sleep(1.5)
        return ranks.broadcast_flag(rank == 0)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [True, True]


@pytest.mark.parametrize("name", ["llama-mha-sharded", "qwen2-yarn-window", "qwen3-moe-mixed"])
@pytest.mark.parametrize("sizes", [(1, 2), (2,)])
def test_logits_and_kv_are_those_of_one_rank(
    groups: list[RankGroup], name: str, sizes: tuple[int, ...]
) -> None:
    """Suspended at random boundaries for other prompts, and resumed."""
    rng = random.Random(f"{name} {sizes}")
    one = make_runner(split_folder(name))
    tokens, other = prompt(rng.randrange(100, 160)), prompt(21)
    request = Request(one, tokens)
    logits, other_logits = prefill(one, request), prefill(one, Request(one, other))
    runners = open_runners(groups, name)
    others = {runner: Request(runner, other) for runner in runners}

    def between(member: Member, boundary: Boundary) -> None:
        if rng.random() < 0.15:
            runner = member.runner
            found = prefill(runner, others[runner])
            torch.testing.assert_close(found, other_logits, rtol=1e-4, atol=1e-4)

    group = RingGroup(
        runners,
        plan(rng, len(tokens), sizes),
        tokens,
        max_chunk_tokens=29,
        rng=rng,
        between=between,
    )
    torch.testing.assert_close(group.run(), logits, rtol=1e-4, atol=1e-4)
    kv = one.pool.storage[:, request.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    split = torch.cat(list(group.kv()), dim=2)  # the heads of all pools
    torch.testing.assert_close(split, kv[:, :, :, : len(tokens)], rtol=1e-4, atol=1e-4)


def test_with_deterministic_kernels_a_ring_gives_the_bits_of_one_member(
    groups: list[RankGroup],
) -> None:
    rng, folder, tokens = random.Random(5), split_folder("qwen3-moe-mixed"), prompt(700)
    with determinism.switched(Alike.GROUPS):
        runners = [open_runner(g, folder, num_pages=128, alike=Alike.GROUPS) for g in groups]
        request = Request(runners[0], tokens)
        logits = prefill(runners[0], request)
        runners[0].pool.free(request.pages)
        cuts = plan(rng, len(tokens), (1, 2))
        group = RingGroup(runners, cuts, tokens, max_chunk_tokens=90, rng=rng)
        assert torch.equal(group.run(), logits)


def test_a_member_without_tokens_serves_the_ring(groups: list[RankGroup]) -> None:
    one, runners = make_runner(split_folder("mixtral")), open_runners(groups, "mixtral")
    tokens, rng = prompt(34), random.Random(5)
    chunks = plan(rng, len(tokens), (1, 2), ends=(33, 34))
    group = RingGroup(runners, chunks, tokens, max_chunk_tokens=64, rng=rng)
    logits = prefill(one, Request(one, tokens))
    torch.testing.assert_close(group.run(), logits, rtol=1e-4, atol=1e-4)


def test_no_rank_begins_a_step_of_the_ring_before_it_is_asked_to(groups: list[RankGroup]) -> None:
    """Else the members would wait for each other where they had agreed to stop."""
    runners = open_runners(groups, "llama3-rope-tied")
    group = RingGroup(
        runners,
        plan(random.Random(1), 60, (2,)),
        prompt(60),
        max_chunk_tokens=64,
        rng=random.Random(1),
    )
    ring, tasks = group.ring(group.layout.chunks[0])
    steps = [runner.prefill_ring(task) for runner, task in zip(runners, tasks[0], strict=True)]
    leader, follower = steps
    assert [next(leader).operator for _ in range(2)] == ["embed", "qkv_proj"]
    time.sleep(0.3)  # in which rank 1 would begin what it may
    assert groups[0].counter.begun(1) == 1
    assert prefill(runners[0], Request(runners[0], prompt(12))).isfinite().all()
    assert ring.published == [0, 0]
    leader.close()
    follower.close()


def test_an_abort_leaves_all_ranks_together(groups: list[RankGroup]) -> None:
    runners = open_runners(groups, "llama3-rope-tied")
    group = RingGroup(
        runners,
        plan(random.Random(1), 60, (2,)),
        prompt(60),
        max_chunk_tokens=64,
        rng=random.Random(1),
    )
    ring, tasks = group.ring(group.layout.chunks[0])
    steps = runners[0].prefill_ring(tasks[0][0])
    assert [next(steps).operator for _ in range(2)] == ["embed", "qkv_proj"]
    ring.abort()
    assert next(steps).operator == "attn"
    steps.close()
    one = make_runner(split_folder("llama3-rope-tied"))
    found = prefill(runners[0], Request(runners[0], prompt(12)))
    torch.testing.assert_close(found, prefill(one, Request(one, prompt(12))), rtol=1e-4, atol=1e-4)
