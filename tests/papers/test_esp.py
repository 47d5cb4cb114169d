"""Elastic sequence parallelism as Tetris section 7.1 runs it: one request at a time."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.planning.esp import Esp
from support.planners import K, inputs, planner


def test_it_expands_for_any_gain_of_its_own():
    """ "this local-optimal strategy lacks global load awareness" (section 2.4): 0.05 s are worth
    eight more instances to it, whatever the configured rate.
    """
    for rate in (0.0, 0.3, 0.9):
        plan = planner("esp", 16, improvement_rate=rate).plan(32 * K, array("d", [1.0] * 16))
        assert plan.ttft_s == 1.53 and len(plan.chunks[0].members) == 16


def test_the_lower_of_two_equal_degrees_wins():
    same = SpLatency(by_sp={1: Latency(a=1.0, b=0.0), 2: Latency(a=1.0, b=0.0)})
    plan = Esp(inputs(2, latency=same)).plan(100, array("d", [0.0, 0.0]))
    assert [chunk.members for chunk in plan.chunks] == [(0,)]


def test_the_cost_model_is_the_papers_for_a_batch_of_one():
    """T = A + B sum(l) + C sum(l^2), a degree each."""
    a, b, c = 0.2, 3e-5, 4e-10
    latency = SpLatency(by_sp={1: Latency(a=9.0, b=1.0), 4: Latency(a=a, b=b, d=c, c=2 * c)})
    plan = Esp(inputs(4, latency=latency)).plan(50_000, array("d", [0.0] * 4))
    assert plan.ttft_s == pytest.approx(a + b * 50_000 + c * 50_000**2)


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=24),
    st.integers(1, 190_000),
    st.floats(0, 1),
)
def test_no_single_chunk_is_earlier(queue, tokens, rate):
    queue_s = array("d", queue)
    greedy = planner("esp", len(queue)).plan(tokens, queue_s)
    prudent = planner("single_chunk", len(queue), improvement_rate=rate).plan(tokens, queue_s)
    assert len(greedy.chunks) == 1 and greedy.ttft_s <= prudent.ttft_s
