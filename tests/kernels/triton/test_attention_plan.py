"""The host's work lists: every visible slot is walked once, and masks are left out only where none
is needed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")

from millrace_kernels import reference
from millrace_kernels.triton_backend import attention_plan
from support.attention_calls import Call, calls

BLOCK_N = 16


@settings(max_examples=60)
@given(call=calls(longest=400), block_m=st.sampled_from([16, 32]), split=st.sampled_from([32, 100]))
def test_work_covers_what_each_row_sees(call, block_m, split):
    plan = call.plan("reference")
    config = {"block_m": block_m, "block_n": BLOCK_N, "split_slots": split}
    chosen = np.diff(plan.q_indptr.numpy()) > 0
    work = attention_plan.build_work(plan, config, chosen)
    seen = [reference.visible(plan, *plan.positions(i)) for i in range(len(plan.sequences))]
    walked = [torch.zeros_like(part, dtype=torch.int32) for part in seen]
    for sequence, first, rows, begin, end, full_begin, full_end, base, _ in work.items.tolist():
        start, _, kv_len = plan.sequences[sequence]
        own = slice(first - start, first - start + rows)
        assert rows <= attention_plan.tile_rows(plan, config)
        assert begin % BLOCK_N == 0 and begin <= full_begin <= full_end <= end <= kv_len
        assert full_end == full_begin or full_begin % BLOCK_N == full_end % BLOCK_N == 0
        assert seen[sequence][own, full_begin:full_end].all()
        walked[sequence][own, begin:end] += 1
        assert base == (0 if plan.kv_positions is None else sum(call.kv_lens[:sequence]))
    for part, times in zip(seen, walked, strict=True):
        assert (times[part] == 1).all() and (times <= 1).all()
    lengths = work.items[:, 4] - work.items[:, 3]
    assert (np.diff(lengths) <= 0).all()


@settings(max_examples=60)
@given(call=calls(longest=400))
def test_pieces_of_a_row_are_merged_once(call):
    plan = call.plan("reference")
    config = {"block_m": 16, "block_n": BLOCK_N, "split_slots": 32}
    work = attention_plan.build_work(plan, config, np.diff(plan.q_indptr.numpy()) > 0)
    whole = work.items[work.items[:, 8] < 0]
    direct = [row for _, first, rows, *_ in whole.tolist() for row in range(first, first + rows)]
    merged = work.merges[:, 0].tolist()
    assert sorted(direct + merged) == list(range(plan.num_tokens))
    written = {}
    for item in work.items[work.items[:, 8] >= 0].tolist():
        written |= {item[8] + i: item[1] + i for i in range(item[2])}
    read = [
        (first + i * stride, row)
        for row, first, stride, pieces in work.merges.tolist()
        for i in range(pieces)
    ]
    assert dict(read) == written and len(read) == len(written) == work.partial_rows


def test_one_sequence_has_a_bounded_number_of_programs():
    call = Call((1,), (200_000,), kv_heads=8, group=4, page_tokens=64)
    config = {"block_m": 16, "block_n": 64, "split_slots": 1024}
    work = attention_plan.build_work(call.plan("reference"), config, np.array([True]))
    assert len(work.items) * 8 <= 528 and work.partial_rows == len(work.items)
    few = Call((1,), (1024,), kv_heads=8, group=4, page_tokens=64)
    assert (
        len(attention_plan.build_work(few.plan("reference"), config, np.array([True])).items) == 1
    )
