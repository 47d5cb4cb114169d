"""Tetris section 7.1: fixed-SP scheduling."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.scheduler.planning.groups import fixed_groups
from support.planners import K, a100, planner


@pytest.mark.parametrize(
    "nodes, size, groups",
    [
        ((0,) * 4 + (1,) * 4, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ((0,) * 4 + (1,) * 4, 8, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ((0, 1, 0, 1), 2, [(0, 2), (1, 3)]),  # on the same node where possible
        ((0, 0, 0, 1, 1, 1), 2, [(0, 1), (3, 4), (2, 5)]),  # and across nodes where not
        ((3, 3, 9), 2, [(0, 1)]),  # one is left over
    ],
)
def test_groups_are_on_one_node_where_possible(nodes, size, groups):
    assert list(fixed_groups(nodes, size)) == groups


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 16))
def test_groups_share_nothing_and_leave_less_than_one_group(nodes, size):
    groups = fixed_groups(nodes, size)
    used = [i for group in groups for i in group]
    assert len(used) == len(set(used)) == len(nodes) // size * size
    within = sum(len({nodes[i] for i in group}) == 1 for group in groups)
    assert within >= sum(nodes.count(node) // size for node in set(nodes))


def test_a_request_goes_to_the_group_with_the_lowest_queue_delay():
    """A group's delay is that of its longest queue."""
    queue_s = array("d", [0.0] * 7 + [2.0] + [1.0] * 8)
    plan = planner("fixed_sp", 16, fixed_sp=8).plan(32 * K, queue_s)
    assert plan.chunks[0].members == tuple(range(8, 16))
    assert plan.ttft_s == 1.0 + 0.58


def test_the_first_of_equals_wins_and_memory_does_not_change_the_size():
    plan = planner("fixed_sp", 16, fixed_sp=4).plan(K, array("d", [1.0] * 16), 16)
    assert plan.chunks[0].members == (0, 1, 2, 3)


@pytest.mark.parametrize("asked, size, used", [(8, 5, 4), (16, 64, 16), (12, 64, 8), (3, 2, 2)])
def test_the_largest_known_degree_within_the_setting_and_the_pool(asked, size, used):
    plan = planner("fixed_sp", size, fixed_sp=asked).plan(64 * K, array("d", [0.0] * size))
    assert len(plan.chunks[0].members) == used
    assert plan.ttft_s == a100().chunk_s(64 * K, 0, used)
