"""Tetris section 5.1, Algorithm 2: single-chunk scheduling."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.scheduler.planning.plan import PlannedChunk
from support.planners import TABLE_1, K, a100, planner


def degree(rate, tokens, queue):
    plan = planner("single_chunk", len(queue), improvement_rate=rate).plan(
        tokens, array("d", queue)
    )
    (chunk,) = plan.chunks
    return len(chunk.members)


@pytest.mark.parametrize(
    "rate, expected",
    [(0.0, 8), (0.2, 8), (0.21, 4), (0.5, 4), (0.69, 4), (0.71, 8), (0.8, 1)],
)
def test_a_degree_grows_only_for_a_gain_above_the_rate(rate, expected):
    """16k on an idle pool: 1.29, 0.69, 0.39, 0.31 and 0.46 s by Table 1. From 4 to 8 instances is a
    gain of 20.5 %. At 0.5 two instances are too little of a gain over one (46.5 %), but four are
    enough (69.8 %): the gain is over the best so far. At 0.71 only eight are (76.0 %).
    """
    assert degree(rate, 16 * K, [0.0] * 16) == expected


def test_queues_count_towards_ttft():
    """ "TTFT <- T_queue + T_prefill", the queue being the longest of the group's."""
    queue = [0.0] * 4 + [3.0] * 12
    plan = planner("single_chunk", 16, improvement_rate=0.0).plan(32 * K, array("d", queue))
    assert plan.chunks == (PlannedChunk(32 * K, (0, 1, 2, 3)),) and plan.ttft_s == 0.92


def test_no_rate_expands_at_all_at_one():
    assert degree(1.0, 128 * K, [0.0] * 16) == 1


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20), st.integers(1, 190_000))
def test_without_a_rate_it_is_the_least_over_all_degrees(queue, tokens):
    """On one node the group of each degree is its shortest queues."""
    latency, shortest = a100(), sorted(queue)
    plan = planner("single_chunk", (0,) * len(queue), improvement_rate=0.0).plan(
        tokens, array("d", queue)
    )
    by_degree = [
        shortest[sp - 1] + latency.chunk_s(tokens, 0, sp) for sp in TABLE_1 if sp <= len(queue)
    ]
    assert plan.ttft_s == min(by_degree)
