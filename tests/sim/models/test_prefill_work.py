"""Seconds of prefill work and its boundaries, against an enumeration of every operator.

FlowPrefill section 5.1 (boundaries of operators, layers, chunks); Tetris section 4.1 (balancing).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.operators import BatchShape
from millrace.core.request import Chunk
from millrace.sim.models.prefill_work import Balancing, PrefillTimes
from support.simulation import LAYERS, prefill_s, toy_operators, toy_profile, toy_spec

OPERATORS = toy_operators()


def passes_of(tokens: int, history: int, longest: int) -> list[tuple[int, int]]:
    sizes = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    return [(size, history + i * longest) for i, size in enumerate(sizes)]


def ends_of(parts: list[tuple[int, int]], granularity: str) -> list[float]:
    """Returns every boundary, one by one: time outside the layers is spread over them."""
    ends, now_s = [0.0], 0.0
    for part in parts:
        shape = BatchShape(prefills=(part,))
        operators_s = OPERATORS.layer_s(shape)
        pass_s = OPERATORS.pass_s(shape)
        scale = pass_s / (LAYERS * sum(operators_s))
        start_s = now_s
        for _ in range(LAYERS):
            for operator_s in operators_s:
                now_s += operator_s * scale
                if granularity == "operator":
                    ends.append(now_s)
            if granularity == "layer":
                ends.append(now_s)
        now_s = start_s + pass_s
        ends.append(now_s)
    return ends


@given(
    tokens=st.integers(1, 20_000),
    history=st.sampled_from([0, 0, 1, 512, 10_000]),
    longest=st.sampled_from([256, 1000, 2048]),
)
def test_a_cut_chunk_takes_the_sum_of_its_passes(tokens, history, longest):
    found_s = PrefillTimes(toy_profile(), longest).work_s([(tokens, history)], 1)
    shapes = [BatchShape(prefills=(part,)) for part in passes_of(tokens, history, longest)]
    assert found_s == pytest.approx(sum(map(OPERATORS.pass_s, shapes)), rel=1e-12)


def test_an_uncut_chunk_and_a_group_take_what_the_profile_says():
    times = PrefillTimes(toy_profile(), 2048)
    assert times.work_s([(2048, 100)], 1) == prefill_s(2048, 100)
    assert times.work_s([(9000, 100)], 4) == prefill_s(9000, 100, 4)
    assert PrefillTimes(toy_profile(), 0).work_s([(9000, 0)], 1) == prefill_s(9000)


def test_a_batch_is_one_ragged_pass():
    found_s = PrefillTimes(toy_profile(), 512).work_s([(400, 0), (300, 0)], 1)
    assert found_s == OPERATORS.pass_s(BatchShape(prefills=((400, 0), (300, 0))))


@given(
    tokens=st.integers(1, 8000),
    history=st.sampled_from([0, 0, 3000]),
    longest=st.sampled_from([0, 512, 2048]),
    share=st.floats(0, 1),
    granularity=st.sampled_from(["operator", "layer", "chunk"]),
)
def test_a_stop_takes_effect_at_the_next_boundary(tokens, history, longest, share, granularity):
    times = PrefillTimes(toy_profile(), longest)
    end_s = times.work_s([(tokens, history)], 1)
    position_s = share * end_s
    found_s = times.boundary_s([(tokens, history)], 1, position_s, granularity)
    parts = passes_of(tokens, history, longest or tokens)
    near_s = 2e-6 * end_s  # positions this close to a boundary count as on it
    ends = ends_of(parts, granularity)
    assert min(abs(found_s - end) for end in ends) <= near_s
    assert found_s >= position_s - near_s
    assert not any(position_s + near_s < end < found_s - near_s for end in ends)


@pytest.mark.parametrize("granularity", ["operator", "layer", "chunk"])
def test_between_two_passes_a_stop_takes_effect_at_once(granularity):
    times = PrefillTimes(toy_profile(), 1000)
    position_s = times.work_s([(2000, 0)], 1)
    assert times.boundary_s([(5000, 0)], 1, position_s, granularity) == position_s


@given(share=st.floats(0, 1), sp=st.sampled_from([1, 2, 8]))
def test_finer_boundaries_never_come_later(share, sp):
    times = PrefillTimes(toy_profile(), 1024)
    parts = [(20_000, 5000)]
    position_s = share * times.work_s(parts, sp)
    found = [
        times.boundary_s(parts, sp, position_s, name)
        for name in ("operator", "layer", "chunk", "none")
    ]
    assert found == pytest.approx(sorted(found), rel=1e-12)
    assert found[-1] == times.work_s(parts, sp)


def test_passes_of_a_group_end_where_eq_1_puts_their_tokens():
    times = PrefillTimes(toy_profile(), 1000)
    found_s = times.boundary_s([(10_000, 500)], 4, prefill_s(4100, 500, 4), "chunk")
    assert found_s == prefill_s(8000, 500, 4)


@pytest.mark.parametrize(
    ("tokens", "sp", "last"), [(5000, 1, 904), (4096, 1, 2048), (5000, 2, 904)]
)
def test_the_last_pass_has_what_is_left(tokens, sp, last):
    assert PrefillTimes(toy_profile(), 2048).last_pass_tokens(tokens, sp) == last


def chunk(tokens: int, start: int, sp: int) -> Chunk:
    members = tuple(f"p{i}" for i in range(sp))
    return Chunk(index=1, start_token=start, num_tokens=tokens, instance_ids=members)


class TestBalancing:
    times = PrefillTimes(toy_profile(), 0)
    balancing = Balancing(toy_spec(), times)

    def test_a_group_that_did_not_grow_moves_nothing(self):
        assert self.balancing.added_s(chunk(4000, 4000, 4), 4, one_node=False) == 0.0

    def test_a_long_chunk_hides_all_layers_but_the_first(self):
        # 8000 tokens of history on 2 -> 4 members: each old one sends 4000 - 2000 tokens of
        # 1000 bytes a layer at 1e9 bytes/s, 2 ms; a member's feed-forward part of 8000 tokens
        # takes 8000 * 3 us = 24 ms.
        added_s = self.balancing.added_s(chunk(32_000, 8000, 4), 2, one_node=False)
        assert added_s == pytest.approx(2e-3)
        assert added_s < 0.018 * prefill_s(32_000, 8000, 4)  # Tetris section 7.4

    def test_a_short_chunk_does_not(self):
        # 400 tokens on 4 members: 100 * 3 us = 0.3 ms hide of 2 ms, in three of the four layers.
        added_s = self.balancing.added_s(chunk(400, 8000, 4), 2, one_node=False)
        assert added_s == pytest.approx(2e-3 + 3 * 1.7e-3)

    def test_the_old_members_links_are_the_narrow_ones(self):
        # 2 -> 8: each of the two sends 4000 - 1000 tokens, each of the six takes in 1000.
        added_s = self.balancing.added_s(chunk(64_000, 8000, 8), 2, one_node=False)
        assert added_s == pytest.approx(3e-3)

    def test_within_a_node_it_is_faster(self):
        added_s = self.balancing.added_s(chunk(32_000, 8000, 4), 2, one_node=True)
        assert added_s == pytest.approx(2e-4)
