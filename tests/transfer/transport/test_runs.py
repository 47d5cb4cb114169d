"""Facts of runs: cached facts hold for shifted runs, too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs

triples = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=9
)
shifts = st.tuples(st.integers(0, 90), st.integers(0, 90))


def of(rows) -> Runs:
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@settings(max_examples=100)
@given(triples, st.lists(shifts, max_size=3))
def test_shifted_runs_know_what_fresh_ones_find_out(rows, moves):
    runs = of(rows)
    runs.indices(runs.grain())
    for source, target in moves:
        runs = runs.shifted(source, target)
        rows = [(s + source, t + target, n) for s, t, n in rows]
    fresh = of(rows)
    assert fresh.grain() == np.gcd.reduce(np.array(rows).ravel())
    assert fresh.grain() % runs.grain() == 0
    assert runs.total_bytes == sum(n for _, _, n in rows)
    for found, expected in zip(
        runs.indices(runs.grain()), fresh.indices(runs.grain()), strict=True
    ):
        assert (found == expected).all()
    ends = max(s + n for s, _, n in rows), max(t + n for _, t, n in rows)
    runs.check_within(*ends)
    for short in ((ends[0] - 1, ends[1]), (ends[0], ends[1] - 1)):
        with pytest.raises(ValueError, match="leaves the"):
            runs.check_within(*short)


@settings(max_examples=60)
@given(triples)
def test_indices_name_every_grain_in_order(rows):
    runs = of(rows)
    grain = runs.grain()
    source, target = runs.indices(grain)
    for side, found in ((0, source), (1, target)):
        expected = [r[side] + at for r in rows for at in range(0, r[2], grain)]
        assert (found.astype(np.int64) * grain).tolist() == expected


@pytest.mark.parametrize("length", [1, 64, 5000])
def test_copies_on_the_host(length):
    rng = np.random.default_rng(length)
    source = rng.integers(0, 256, 40_000, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    rows = [(7 * i * length // 7 + i, (3 - i) * (length + 5), length) for i in range(4)]
    for s, t, n in rows:
        expected[t : t + n] = source[s : s + n]
    copy_on_host(Memory.of_array(source), Memory.of_array(target), of(rows))
    assert (target == expected).all()


def test_no_runs_are_no_trouble():
    none = Runs(*(np.empty(0, dtype=np.int64),) * 3)
    assert (len(none), none.total_bytes, none.grain()) == (0, 0, 0)
    none.check_within(0, 0)
    array = np.zeros(1, dtype=np.uint8)
    copy_on_host(Memory.of_array(array), Memory.of_array(array), none)


def test_memory_that_cannot_be_registered_or_copied():
    with pytest.raises(ValueError, match="contiguous"):
        Memory.of_array(np.zeros((4, 4), dtype=np.uint8)[:, 1])
    host = Memory.of_array(np.zeros(8, dtype=np.uint8))
    with pytest.raises(ValueError, match="host memory"):
        copy_on_host(Memory(host.pointer, 8, device=0), host, Runs.of(0, 0, 8))
