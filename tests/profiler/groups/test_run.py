"""Groups of instances with a known law: the measurements and the profile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.profiler.accuracy import compare
from millrace.profiler.command import ProfileOptions
from millrace.profiler.fitting import build_profile, group_latencies
from millrace.profiler.groups.measure import MeasuredGroups, devices_of, measure_groups
from millrace.profiler.groups.run import ChunkTime, Run
from millrace.profiler.measure import Prefill
from support.known_law import CHUNK, SUBJECT, measured

LONGEST = 1024


def law_s(tokens: int, history: int, sp: int) -> float:
    return 0.01 * sp + (20e-6 * tokens + 10e-9 * tokens * (history + tokens / 2)) / sp


class Fleet:
    """A fleet that takes no real time. A group's first run is slow: its members connect."""

    def __init__(self) -> None:
        self.plans: list[list[PlannedChunk]] = []

    async def compute(self, plan: Sequence[PlannedChunk]) -> Run:
        cold_s = 0.0 if plan[-1].members in [one[-1].members for one in self.plans] else 1.0
        self.plans.append(list(plan))
        chunks, start = [], 0
        for tokens, members in plan:
            seconds = law_s(tokens, start, len(members)) + cold_s
            chunks.append(ChunkTime(compute_s=seconds, ring_wait_s=0.0, history_wait_s=0.0))
            start += tokens
        return Run(chunks=tuple(chunks), started_s=0.0, ttft_s=1.0, landed_s=1.0)


def of(*degrees: int, cores: int = 2) -> MeasuredGroups:
    found = measure_groups(Fleet().compute, degrees, longest=LONGEST, budget_s=10.0, cores=cores)
    return asyncio.run(found)


def test_every_degree_gets_its_own_law_from_points_and_history() -> None:
    groups = of(2, 4)
    for sp, latency in group_latencies(groups).items():
        assert [tokens for tokens, _ in latency.points] == [64, 128, 256, 512, 1024]
        assert latency.c == pytest.approx(10e-9 / sp, rel=1e-3)
        for tokens, history in ((100, 0), (700, 0), (256, 700), (5000, 0)):
            expected = law_s(tokens, history, sp)
            assert latency.chunk_s(tokens, history) == pytest.approx(expected, rel=1e-3)
    assert Prefill(256, 512) in groups.seconds[4] and not groups.held_out & {Prefill(256, 512)}


def test_a_group_is_the_first_instances_and_connects_before_it_is_measured() -> None:
    fleet = Fleet()
    asyncio.run(measure_groups(fleet.compute, [3], longest=100, budget_s=1e-9, cores=2))
    assert {chunk.members for plan in fleet.plans for chunk in plan} == {(0, 1, 2)}
    assert sum(chunk.num_tokens for chunk in fleet.plans[0]) == 64
    assert len(fleet.plans) == 1 + 2 + 1 + 3  # lengths, history, held out


def test_the_profile_says_what_was_measured_and_how_far_it_is_off() -> None:
    found, groups = measured(), of(2, 4)
    profile = build_profile(SUBJECT, found, groups)
    assert profile.measured_sp == (2, 4)
    assert profile.prefill.by_sp[4] == group_latencies(groups)[4]
    alone = build_profile(SUBJECT, found)
    assert alone.measured_sp == () and alone.prefill.by_sp[8] == profile.prefill.by_sp[8]
    assert profile.errors["sp2"] < 0.01 and profile.errors["sp4_worst"] < 0.01
    held_out = [one for one in compare(profile, found, CHUNK, groups) if one.model == "sp4"]
    assert [one.case for one in held_out if one.is_held_out] == sorted(groups.held_out)
    assert len(groups.held_out) == 3


def test_one_instance_as_a_service_counts_for_degree_one() -> None:
    profile = build_profile(SUBJECT, measured(), of(1, 2))
    assert profile.measured_sp == (2,)
    assert profile.prefill.chunk_s(700) == pytest.approx(law_s(700, 0, 1), rel=1e-3)


def test_instances_that_shared_cores_are_named() -> None:
    shared = build_profile(SUBJECT, measured(), of(2, 4))
    (said,) = [one for one in shared.assumptions if "shared" in one]
    assert said.startswith("groups of 4: their instances of 1 threads shared 2 cores")
    for subject, cores in ((SUBJECT, 4), (replace(SUBJECT, is_accelerated=True), 2)):
        alone = build_profile(subject, measured(), of(2, 4, cores=cores))
        assert not any("shared" in one for one in alone.assumptions)


def test_each_instance_has_its_own_devices() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert devices_of(names, 4, 1) == ["a", "b", "c", "d", "e"]
    assert devices_of(names, 5, 1) == ["a", "b", "c", "d", "e", "a"]
    assert devices_of(names, 2, 2) == ["a,b", "c,d", "a,b"]
    with pytest.raises(ValueError, match="3 instances of 2 devices each; there are 5 devices"):
        devices_of(names, 3, 2)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(Exception, match="sp has 1; a group has 2 instances or more"):
        ProfileOptions(model="m", budget_s=1.0, sp=(1, 2))
