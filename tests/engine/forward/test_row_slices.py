"""Where attention is cut into slices of rows. That a pass computes the same with them is tested in
`tests/engine/device/graph_steps.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.forward.row_slices import MOST_SLICES, SLICE_FLOPS, cut_rows

LLAMA_FLOPS = 4.0 * 32 * 128  # of a row over a slot
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 3000)), min_size=1, max_size=4
)  # rows, and history before them


def tables(sequences):
    rows = np.array([rows for rows, _ in sequences])
    indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(rows))).astype(np.int32))
    kv_lens = [rows + history for rows, history in sequences]
    return indptr, torch.tensor(kv_lens, dtype=torch.int32)


def seen(indptr, kv_lens):
    """Returns (sequence, K/V slots that the row sees) of each row."""
    return [
        (index, kv_len - (stop - row) + 1)
        for index, (start, stop, kv_len) in enumerate(
            zip(indptr[:-1].tolist(), indptr[1:].tolist(), kv_lens.tolist(), strict=True)
        )
        for row in range(start, stop)
    ]


@given(SEQUENCES, st.sampled_from([None, 1, 100]), st.sampled_from([1e5, 1e6, 1e7]))
def test_slices_have_all_rows_in_order_and_each_sees_what_it_saw(sequences, window, slice_flops):
    indptr, kv_lens = tables(sequences)
    slices = cut_rows(indptr, kv_lens, flops_per_slot=4.0, window=window, slice_flops=slice_flops)
    whole = seen(indptr, kv_lens)
    assert len(slices) != 1 and len(slices) <= MOST_SLICES
    found = [row for one in slices for row in seen(one.indptr, one.kv_lens)]
    assert found == (whole if slices else [])
    bounds = [(one.start, one.stop) for one in slices]
    assert bounds == sorted(bounds) and all(start < stop for start, stop in bounds)


@pytest.mark.parametrize(
    ("rows", "history", "count"),
    [(2048, 0, 1), (8192, 0, 1), (8192, 24_576, 4), (2048, 1 << 20, MOST_SLICES), (32, 1 << 20, 1)],
)
def test_a_slice_is_about_the_work_of_another_operator(rows, history, count):
    indptr, kv_lens = tables([(rows, history)])
    slices = cut_rows(indptr, kv_lens, flops_per_slot=LLAMA_FLOPS, window=None)
    assert max(len(slices), 1) == count
    for one in slices:
        work = LLAMA_FLOPS * sum(slots for _, slots in seen(one.indptr, one.kv_lens))
        assert 0.5 * SLICE_FLOPS < work < 1.2 * SLICE_FLOPS or count == MOST_SLICES
