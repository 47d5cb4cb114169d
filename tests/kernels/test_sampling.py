"""Sampling: every implementation against the float64 reference, and equal in every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace_kernels import api, cpu_backend, reference
from millrace_kernels.cpu_backend import rows as cpu_rows
from millrace_kernels.torch_backend import sampling as torch_sampling

NEAR = 1e-9  # with a uniform or share closer to a threshold than this, rounding may decide
SETTINGS = settings(max_examples=60)
COLUMNS = (torch.float64, torch.int64, torch.float64, torch.float64, torch.float64)
Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]


NAMES = ["torch", *cpu_backend.instruction_sets()]


@contextmanager
def sampling_by(name: str) -> Iterator[Sample]:
    """Yields `sample` of torch, or of C++ under an instruction set."""
    if name == "torch":
        yield torch_sampling.sample
        return
    with cpu_backend.instruction_set(name):
        yield cpu_rows.sample


@pytest.fixture(params=NAMES)
def sample(request) -> Iterator[Sample]:
    with sampling_by(request.param) as sample:
        yield sample


def columns(rows: list[tuple[float, int, float, float, float]]) -> list[torch.Tensor]:
    """(temperature, top_k, top_p, min_p, uniform) of each row as the arguments of `sample`."""
    return [
        torch.tensor(column, dtype=dtype)
        for column, dtype in zip(zip(*rows, strict=True), COLUMNS, strict=True)
    ]


row_settings = st.tuples(
    st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.0, 3.0]),
    st.sampled_from([0, 0, 0, 1, 2, 7, 40, 1500, 10**6]),
    st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.9, 0.999]),
    st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    st.floats(0, 1 - 2**-53),
)


def is_clear(logits: torch.Tensor, row: tuple[float, int, float, float, float]) -> bool:
    """Returns whether the oracle's token is equal a little to either side of each threshold."""
    temperature, top_k, top_p, min_p, uniform = row
    found = set()
    for step in (-NEAR, 0.0, NEAR):
        for share in (top_p, max(top_p + step, 0.0) if top_p < 1 else top_p):
            for least in (min_p, max(min_p + step, 1e-300) if 0 < min_p < 1 else min_p):
                at = min(max(uniform + step, 0.0), 1 - 2**-53)
                found.add(reference.draw(logits, temperature, top_k, share, least, at))
    return len(found) == 1


@SETTINGS
@given(
    rows=st.lists(row_settings, min_size=1, max_size=4),
    vocab=st.integers(1, 90),
    levels=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 10**6),
)
def test_small_vocabularies(rows, vocab, levels, seed):
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if levels:
        logits = logits.clamp(-1, 1).mul(levels).round()  # ties
    expected, peaks = reference.sample(logits, *columns(rows))
    clear = [is_clear(line.double(), row) for line, row in zip(logits, rows, strict=True)]
    for name in NAMES:
        with sampling_by(name) as sample:
            found, found_peaks = sample(logits, *columns(rows))
        assert torch.equal(found_peaks, peaks), name
        assert found[clear].tolist() == expected[clear].tolist(), name


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@settings(SETTINGS, max_examples=12)
@given(row=row_settings, seed=st.integers(0, 10**6))
def test_large_vocabularies(spread, row, seed):
    logits = torch.randn(1, 5003, generator=torch.Generator().manual_seed(seed)) * spread
    assume(is_clear(logits[0].double(), row))
    expected = reference.draw(logits[0].double(), *row)
    for name in NAMES:
        with sampling_by(name) as sample:
            found, _ = sample(logits, *columns([row]))
        assert found.item() == expected, name


@pytest.mark.parametrize("vocab", [1, 15, 16, 1025, 5003])
def test_greedy_takes_the_lowest_of_equal_ids(sample, vocab):
    logits = torch.full((vocab, vocab if vocab < 1000 else 64), -1.0)
    for i in range(len(logits)):
        logits[i, i % logits.shape[1] :] = 2.0
    found, peaks = sample(logits, *columns([(0.0, 0, 1.0, 0.0, 0.5)] * len(logits)))
    assert found.tolist() == [i % logits.shape[1] for i in range(len(logits))]
    assert (peaks == 2.0).all()


@pytest.mark.parametrize("place", [0, 7, 8, 2000, 2047, 2050])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_peak_that_is_not_finite_is_handed_back_and_spoils_no_other_row(sample, place, bad):
    logits = torch.randn(3, 2051, generator=torch.Generator().manual_seed(1))
    rows = columns([(1.0, 0, 0.9, 0.0, 0.4)] * 3)
    good, _ = sample(logits, *rows)
    logits[1, place] = bad
    found, peaks = sample(logits, *rows)
    assert found[[0, 2]].tolist() == good[[0, 2]].tolist()
    assert peaks[1].isnan() if math.isnan(bad) else peaks[1] == bad


def test_a_row_of_nothing_but_minus_infinity(sample):
    logits = torch.full((3, 40), -math.inf)
    rows = columns([(0.0, 0, 1.0, 0.0, 0.5), (1.0, 0, 1.0, 0.0, 0.5), (1.0, 3, 0.5, 0.1, 0.5)])
    assert sample(logits, *rows)[1].isneginf().all()


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 0, 1.0, 0.0),
        (1.0, 0, 0.9999, 0.0),
        (5.0, 0, 1.0, 1e-9),
        (1e-30, 0, 1.0, 0.0),
        (1e300, 9, 1.0, 0.0),
    ],
)
def test_tokens_without_probability_are_never_drawn(sample, row):
    logits = torch.full((64, 3000), -math.inf)
    logits[:, [5, 2999]] = 0.0
    logits[:, 7] = -1e30
    uniforms = [i / 64 for i in range(62)] + [0.0, 1 - 2**-53]
    found, _ = sample(logits, *columns([(*row, uniform) for uniform in uniforms]))
    assert set(found.tolist()) <= ({5, 2999} if row[0] < 1e30 else {5, 7, 2999})


def test_a_row_is_the_same_in_every_batch_and_on_any_threads(sample, threads):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 7001, generator=generator) * 3
    kinds = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 20, 0.8, 0.01)]
    uniforms = torch.rand(24, generator=generator, dtype=torch.float64).tolist()
    rows = columns([(*kinds[i % 4], uniform) for i, uniform in enumerate(uniforms)])
    torch.set_num_threads(1)
    whole, _ = sample(logits, *rows)
    torch.set_num_threads(3)
    assert torch.equal(sample(logits, *rows)[0], whole)
    for i in range(24):
        alone, _ = sample(logits[i : i + 1], *(column[i : i + 1] for column in rows))
        assert alone.item() == whole[i]


def test_rows_may_share_logits_or_be_strided(sample):
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4))
    rows = columns([(1.0, 0, 1.0, 0.0, i / 8) for i in range(8)])
    expected, _ = sample(logits.repeat(8, 1), *rows)
    assert torch.equal(sample(logits.expand(8, -1), *rows)[0], expected)
    assert torch.equal(sample(logits.repeat(8, 1).T.contiguous().T, *rows)[0], expected)


def test_no_rows(sample):
    ids, peaks = sample(torch.zeros(0, 9), *(torch.zeros(0, dtype=dtype) for dtype in COLUMNS))
    assert ids.shape == peaks.shape == (0,)


def test_bad_input():
    logits, rows = torch.zeros(2, 9), columns([(1.0, 0, 1.0, 0.0, 0.5)] * 2)
    api.sample(logits, *rows)
    for place in range(5):
        short = [column[:1] if i == place else column for i, column in enumerate(rows)]
        with pytest.raises(ValueError, match="a setting is"):
            api.sample(logits, *short)
        with pytest.raises(ValueError, match="a setting is"):
            api.sample(logits, *(x.int() if i == place else x for i, x in enumerate(rows)))
    with pytest.raises(ValueError, match="logits must be float32"):
        api.sample(logits.bfloat16(), *rows)
    with pytest.raises(ValueError, match="logits must be float32"):
        api.sample(torch.zeros(2, 0), *rows)
