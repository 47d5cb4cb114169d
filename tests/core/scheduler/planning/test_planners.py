"""The properties of all planners, and the planner in C++ against the reference."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.errors import ConfigError
from millrace.core.scheduler.planning import PLANNERS, PlannerInputs, degrees_used
from millrace.core.scheduler.planning._cdsp import CdspPlanner
from millrace.core.scheduler.planning.cdsp import Cdsp
from millrace.core.scheduler.planning.cdsp_reference import CdspReference
from millrace.core.scheduler.planning.least_queue import LeastQueue
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk
from millrace.core.scheduler.planning.single_chunk import SingleChunk
from support.planners import check, inputs, planner, random_case

CASES = 3000


def test_cpp_decides_bit_for_bit_as_the_twin():
    """Same chunk lengths, same members in the same order, same doubles."""
    draw = random.Random(20)
    chunked = 0
    for _ in range(CASES):
        given_inputs, tokens, queue_s, least_sp, shortest = random_case(draw)
        twin = CdspReference(given_inputs, min_chunk_tokens=shortest)
        expected = twin.plan(tokens, queue_s, least_sp)
        found = Cdsp(given_inputs, min_chunk_tokens=shortest).plan(tokens, queue_s, least_sp)
        assert found == expected, (given_inputs, tokens, queue_s, least_sp, shortest)
        alone = SingleChunk(given_inputs).plan(tokens, queue_s, least_sp)
        assert alone == twin.plan_single_chunk(tokens, queue_s, least_sp)
        chunked += len(expected.chunks) > 1
    assert chunked > CASES / 10  # else the cases test little


def test_a_planner_carries_nothing_from_plan_to_plan():
    draw = random.Random(3)
    kept = planner("cdsp", 32, improvement_rate=0.1)
    for _ in range(200):
        queue_s = array("d", [draw.uniform(0, 3) for _ in range(32)])
        tokens = draw.randint(1, 190_000)
        fresh = planner("cdsp", 32, improvement_rate=0.1)
        assert kept.plan(tokens, queue_s) == fresh.plan(tokens, queue_s)


queues = st.lists(st.floats(0, 20), min_size=1, max_size=20)


@pytest.mark.parametrize("name", PLANNERS)
@given(
    queue=queues, tokens=st.integers(1, 190_000), seed=st.integers(0, 9), least=st.integers(1, 40)
)
def test_plans_are_whole_nested_and_tell_their_own_ttft(name, queue, tokens, seed, least):
    nodes = tuple(random.Random(seed).choices(range(4), k=len(queue)))
    given_inputs = inputs(nodes, planner=name, improvement_rate=0.1)
    queue_s = array("d", queue)
    plan = PLANNERS[name](given_inputs).plan(tokens, queue_s, least)
    check(plan, tokens, given_inputs, queue_s)
    assert plan == PLANNERS[name](given_inputs).plan(tokens, queue_s, least)
    assert list(queue_s) == queue
    assert all(len(chunk.members) in degrees_used(given_inputs) for chunk in plan.chunks)


@given(queue=queues, tokens=st.integers(1, 190_000), least=st.integers(1, 40))
@pytest.mark.parametrize("name", ["cdsp", "single_chunk", "esp"])
def test_memory_asks_for_a_least_degree_of_the_last_chunk(name, queue, tokens, least):
    last = planner(name, len(queue)).plan(tokens, array("d", queue), least).chunks[-1]
    usable = [sp for sp in (1, 2, 4, 8, 16) if sp <= len(queue)]
    assert len(last.members) >= min(least, usable[-1])


@pytest.mark.parametrize("name", PLANNERS)
def test_one_instance_is_a_pool(name):
    plan = planner(name, 1).plan(4096, array("d", [2.0]), 16)
    assert plan == Plan((PlannedChunk(4096, (0,)),), 2.0 + 0.28)


@pytest.mark.parametrize("name", ["cdsp", "single_chunk", "esp", "fixed_sp"])
def test_degrees_larger_than_the_pool_are_dropped(name):
    assert degrees_used(inputs(5, planner=name))[-1] == 4
    plan = planner(name, 5).plan(131_072, array("d", [0.0] * 5))
    assert len(plan.chunks[-1].members) == 4


def test_degrees_that_each_planner_uses():
    found = {name: degrees_used(inputs(20, planner=name)) for name in PLANNERS}
    every = (1, 2, 4, 8, 16)
    assert found == {
        "auto": every,
        "least_queue": (1,),
        "fixed_sp": (8,),
        "single_chunk": every,
        "esp": every,
        "cdsp": every,
    }


def test_by_default_cdsp_plans_where_groups_can_be_formed():
    assert isinstance(PLANNERS["auto"](inputs(20)), Cdsp)
    assert isinstance(PLANNERS["auto"](inputs(1)), LeastQueue)
    alone = PlannerInputs(latency=SpLatency(), nodes=(0, 0), config=SchedulerConfig())
    assert isinstance(PLANNERS["auto"](alone), LeastQueue)
    assert degrees_used(alone) == (1,)


def test_a_pool_without_instances_is_refused():
    empty = PlannerInputs(latency=SpLatency(), nodes=(), config=SchedulerConfig())
    with pytest.raises(ConfigError, match="at least 1"):
        CdspReference(empty)
    with pytest.raises(ConfigError, match="at least 1"):
        Cdsp(empty)
    with pytest.raises(ConfigError, match="min_chunk_tokens is 0"):
        Cdsp(inputs(1), min_chunk_tokens=0)


def compiled(nodes=(0,), degrees=((1, 0.0, ((0, 0.0, 1e-3, 0.0),)),)):
    return CdspPlanner(nodes, degrees, 1, Plan, PlannedChunk)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nodes": (), "degrees": ()}, "at least one"),
        ({"nodes": (0, 7)}, "numbered from 0"),
        ({"nodes": (0, -1)}, "numbered from 0"),
        ({"nodes": (1, 1)}, "numbered from 0"),
        ({"degrees": ()}, "at least one degree"),
        ({"degrees": ((2, 0.0, ((0, 0.0, 1e-3, 0.0),)),)}, "must ascend"),
        ({"degrees": ((0, 0.0, ((0, 0.0, 1e-3, 0.0),)),)}, "must ascend"),
        ({"degrees": ((1, 0.0, ()),)}, "needs a segment"),
    ],
)
def test_what_the_compiled_planner_refuses_to_be_made_of(changes, message):
    with pytest.raises(ValueError, match=message):
        compiled(**changes)


def test_what_the_compiled_planner_refuses_to_plan():
    one = compiled()
    with pytest.raises(ValueError, match="1 or more"):
        one.plan(0, array("d", [0.0]), 1, 0.3)
    with pytest.raises(ValueError, match="one double an instance"):
        one.plan(1, array("d", [0.0, 0.0]), 1, 0.3)
    with pytest.raises(ValueError, match="NaN"):
        one.plan(1, array("d", [float("nan")]), 1, 0.3)
    with pytest.raises(TypeError, match="array of doubles"):
        one.plan(1, array("f", [0.0]), 1, 0.3)
    with pytest.raises(TypeError, match="bytes-like"):
        one.plan_single_chunk(1, [0.0], 1, 0.3)


def test_the_compiled_planner_follows_every_segment_of_a_model():
    """Around each measured point, where the segment changes."""
    model = Latency(a=0.1, b=1e-5, c=2e-10, d=1e-10, points=((100, 0.2), (5000, 0.3), (9000, 0.9)))
    latency = SpLatency(by_sp={1: model})
    for tokens in (1, 99, 100, 101, 4999, 5000, 5001, 8999, 9000, 9001, 10**9):
        given_inputs = inputs(1, latency=latency)
        plan = Cdsp(given_inputs).plan(tokens, array("d", [0.0]))
        assert plan.ttft_s == model.chunk_s(tokens)


@pytest.mark.parametrize("name", ["cdsp", "single_chunk", "esp"])
def test_history_before_the_first_chunk_counts(name):
    """The C++ planner has history in its coefficients, the algorithm as written has it as C.

    Its sums are in another order: the last bit may differ, and with it a tie.
    """
    draw, same = random.Random(21), 0
    for _ in range(500):
        given_inputs, tokens, queue_s, least_sp, _ = random_case(draw)
        rate = 0.0 if name == "esp" else given_inputs.config.improvement_rate
        config = replace(given_inputs.config, planner=name, improvement_rate=rate)
        behind = replace(given_inputs, config=config, history=draw.randint(1, 500_000))
        plan = PLANNERS[name](behind).plan(tokens, queue_s, least_sp)
        twin = CdspReference(behind)
        plan_as_written = twin.plan if name == "cdsp" else twin.plan_single_chunk
        wanted = plan_as_written(tokens, queue_s, least_sp)
        assert plan.ttft_s == pytest.approx(wanted.ttft_s, rel=1e-6)
        assert sum(chunk.num_tokens for chunk in plan.chunks) == tokens
        same += [c.members for c in plan.chunks] == [c.members for c in wanted.chunks]
    assert same >= 495


@pytest.mark.parametrize("name", ["fixed_sp", "least_queue"])
def test_history_makes_a_chunk_longer(name):
    after = replace(inputs(4, planner=name, fixed_sp=2), history=50_000)
    plan = PLANNERS[name](after).plan(1000, array("d", [1.0] * 4))
    (chunk,) = plan.chunks
    assert plan.ttft_s == 1.0 + after.latency.chunk_s(1000, 50_000, len(chunk.members))
