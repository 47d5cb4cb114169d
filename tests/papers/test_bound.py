"""The offline bound: never below a real schedule, and exact where work can be divided."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.experiments.joined import bound, goodputs, policies
from millrace.experiments.joined import common as joined
from millrace.experiments.joined.least_work import LeastWork
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.models.prefill_work import PrefillTimes

#: (release, time until the deadline, work) of a prompt.
Prompt = tuple[int, int, int]
PROMPTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5
).map(sorted)


def offline(prompts: list[Prompt], instances: int) -> bound.Offline:
    releases, allowed, works = (
        np.array(column, dtype=float) for column in zip(*prompts, strict=True)
    )
    return bound.Offline(releases, releases + allowed, works, instances)


def all_in_time(prompts: list[Prompt], works: tuple[int, ...], instances: int) -> bool:
    """EDF on the whole pool, one unit of time after another."""
    left = list(works)
    for now in range(12):
        power = instances
        for at in sorted(range(len(left)), key=lambda at: prompts[at][0] + prompts[at][1]):
            release, allowed, _ = prompts[at]
            if release <= now < release + allowed:
                done = min(power, left[at])
                left[at] -= done
                power -= done
    return not any(left)


def whole_work(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """Each prompt wholly or not at all."""
    return list(itertools.product(*((0, work) for _, _, work in prompts)))


@given(PROMPTS, st.integers(1, 3), st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_shares_are_the_best_that_divisible_work_allows(prompts, instances, prices) -> None:
    prices = prices[: len(prompts)]
    found = offline(prompts, instances).best_shares(np.array(prices, dtype=float))
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in found)

    best = max(
        sum(
            price * part / work
            for price, part, (_, _, work) in zip(prices, parts, prompts, strict=True)
        )
        for parts in itertools.product(*(range(work + 1) for _, _, work in prompts))
        if all_in_time(prompts, parts, instances)
    )
    assert found @ prices == pytest.approx(best, abs=1e-6)


@given(PROMPTS, st.integers(1, 3), st.floats(0.3, 1.0), st.integers(1, 3))
def test_what_a_schedule_reaches_is_never_excluded(prompts, instances, goal, parts) -> None:
    groups = [np.arange(len(prompts))[part::parts] for part in range(min(parts, len(prompts)))]
    reached = max(
        min(sum(works[at] > 0 for at in group) / len(group) for group in groups)
        for works in whole_work(prompts)
        if all_in_time(prompts, works, instances)
    )
    if goal <= reached:
        assert bound.carries(offline(prompts, instances), groups, goal)


@pytest.mark.parametrize("work, carried", [(0.0499, True), (0.0501, False)])
def test_two_groups_share_what_there_is(work: float, carried: bool) -> None:
    """9 of 10 cheap prompts and 9 of 10 that take twice as long, all within 1.35 s."""
    prompts = 20
    works = np.where(np.arange(prompts) < 10, work, 2 * work)
    pool = bound.Offline(np.zeros(prompts), np.full(prompts, 1.35), works, 1)
    groups = [np.arange(10), np.arange(10, 20)]
    assert bound.carries(pool, groups) == carried
    assert bound.carries(pool, [np.arange(prompts)])  # 10 cheap and 8 others are enough


def test_a_group_needs_a_whole_number_of_prompts() -> None:
    """90 % of 14 are 12.6: 13 of them."""
    pool = bound.Offline(np.zeros(14), np.full(14, 12.8), np.ones(14), 1)
    assert not bound.carries(pool, [np.arange(14)])
    assert bound.carries(pool, [np.arange(14)], goal=12 / 14)


def test_more_load_never_leaves_more_time() -> None:
    rng = random.Random(7)
    releases = np.array(sorted(rng.uniform(0, 100) for _ in range(80)))
    allowed = np.array([rng.choice((1.0, 3.0, 12.0)) for _ in range(80)])
    works = allowed * np.array([rng.uniform(0.2, 1.5) for _ in range(80)])
    prices = np.array([rng.uniform(0.5, 2.0) for _ in range(80)])
    worth = [
        bound.Offline(releases / load, releases / load + allowed, works, 2).best_shares(prices)
        @ prices
        for load in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    assert worth == sorted(worth, reverse=True) and worth[0] > 1.5 * worth[-1]


# ---- least work


def spec(**more) -> SimSpec:
    return joined.apart(joined.scheduler(policy="millrace", batch_tokens=2048), **more)


@pytest.mark.parametrize("longest_pass", [0, 8192])
def test_no_plan_of_chunks_takes_less_work(longest_pass: int) -> None:
    cluster = spec(max_chunk_tokens=longest_pass)
    times = PrefillTimes(cluster.profile, longest_pass)
    least = LeastWork(cluster)
    rng = random.Random(3)
    for _ in range(400):
        tokens = int(2 ** rng.uniform(0, 20))
        cuts = sorted({0, tokens, *(rng.randrange(tokens) for _ in range(rng.randrange(4)))})
        work = 0.0
        for start, end in itertools.pairwise(cuts):
            sp = rng.choice((1, 1, 2, 4, 8))
            work += sp * times.work_s([(end - start, start)], sp)
        assert least.at(tokens) <= work * (1 + 1e-12)


def test_long_prompts_take_little_more_in_one_chunk() -> None:
    cluster = spec(max_chunk_tokens=8192)
    times = PrefillTimes(cluster.profile, 8192)
    least = LeastWork(cluster)
    for tokens in (2047, 5000, 9000, 20_000, 60_000, 131_072, 500_000, 1_000_000):
        work = min(sp * times.work_s([(tokens, 0)], sp) for sp in (1, 2, 4, 8))
        assert 0.98 * work < least.at(tokens) <= work * (1 + 1e-12)


def test_members_of_a_batch_never_take_less_work() -> None:
    cluster = spec(max_chunk_tokens=8192)
    times = PrefillTimes(cluster.profile, 8192)
    least = LeastWork(cluster)
    rng = random.Random(5)
    for _ in range(400):
        room, members = 2047, []
        while room > 0 and len(members) < rng.choice((2, 4, 64)):
            members.append(min(room, int(2 ** rng.uniform(0, 11))))
            room -= members[-1]
        if len(members) > 1:
            work = times.work_s([(tokens, 0) for tokens in members], 1)
            assert sum(map(least.at, members)) <= work * (1 + 1e-12)


def test_without_batches_a_short_prompt_takes_a_pass_of_its_own() -> None:
    cluster = joined.apart(joined.in_order())
    alone_s = cluster.profile.prefill.chunk_s(100)
    assert LeastWork(cluster).at(100) == pytest.approx(alone_s)
    assert LeastWork(spec()).at(100) < alone_s / 4


def test_the_default_is_set_beside_the_bound() -> None:
    found = {("agents", seed, "millrace"): dict.fromkeys(goodputs.CRITERIA, 3.0) for seed in (1, 2)}
    most = {
        ("agents", 1): {"requests": 3.0, "classes": 6.0, "bands": 0.0},
        ("agents", 2): {"requests": 3.0, "classes": 24.0, "bands": 6.0},
    }
    reached = policies.over_bound(found, most, "agents", (1, 2))
    assert reached["requests"] == {"bound": pytest.approx(3.0), "ratio": pytest.approx(1.0)}
    assert reached["classes"] == {"bound": pytest.approx(12.0), "ratio": pytest.approx(0.25)}
    assert reached["bands"] == {"bound": 0.0, "ratio": None}
