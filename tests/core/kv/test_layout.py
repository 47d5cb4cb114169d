"""Where the pools of an instance's members lie, and the ring's buffers in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout, stage_layers

WHOLE = KvLayout(
    model_hash="m",
    dtype="float32",
    num_layers=5,
    num_kv_heads=4,
    head_dim=8,
    page_tokens=16,
    head_start=0,
    head_count=4,
    num_pages=3,
)


@given(st.integers(1, 80), st.data())
def test_stages_share_the_layers_in_order_and_differ_by_one_at_most(
    total: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, total))
    held = [stage_layers(total, index, count) for index in range(count)]
    assert [layer for layers in held for layer in layers] == list(range(total))
    assert {len(layers) for layers in held} <= {total // count, total // count + 1}


@pytest.mark.parametrize(
    ("stages", "parts", "copies", "names"),
    [
        (1, 2, 2, ["rank 0", "rank 1", "rank 2", "rank 3"]),
        (3, 1, 1, ["stage 0", "stage 1", "stage 2"]),
        (
            *(2, 2, 1),
            [f"rank {rank} of stage {stage}" for rank in range(2) for stage in range(2)],
        ),
    ],
)
def test_pools_of_members_fill_the_pools_of_all(
    stages: int, parts: int, copies: int, names: list[str]
) -> None:
    """Stages move no byte: the layers of a rank lie one after another."""
    layout = replace(WHOLE, stages=stages, parts=parts, copies=copies)
    pools = layout.member_pools
    assert [pool.name for pool in pools] == names
    assert pools[0].start == 0
    assert all(one.start + one.nbytes == other.start for one, other in pairwise(pools))
    assert pools[-1].start + pools[-1].nbytes == layout.pool_bytes
    for pool in pools:
        first = stage_layers(5, pool.stage, stages).start
        assert pool.start == pool.rank * layout.part_bytes + layout.layer_offset(first)


def test_a_layers_blocks_arrive_in_layers_of_its_stage() -> None:
    layout = replace(WHOLE, stages=2, layer_start=7, model_layers=12)
    starts = [layout.buffer_offset(layer) // layout.layer_bytes for layer in layout.layers]
    assert starts == [0, 0, 2, 2, 2]
    assert layout.buffer_layers == 2  # as many as both stages have
    alone = replace(layout, stages=1)
    assert {alone.buffer_offset(layer) for layer in alone.layers} == {0}
    assert alone.buffer_layers == 5


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_layout\.stages is 6; it must be at most num_layers"):
        replace(WHOLE, stages=6)
