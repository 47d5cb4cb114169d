"""Philox4x32-10 against its authors' known answers (Random123's kat_vectors)."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.engine.sampling.philox import philox4x32, uniforms

# (counter, key, result), of 10 rounds: all zero, all one, digits of pi.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(words):
    return np.array(words, dtype=np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox4x32(column(counter), column(key))[:, 0].tolist() == expected


def test_columns_are_independent():
    counters = np.concatenate([column(c) for c, _, _ in KNOWN], axis=1)
    keys = np.concatenate([column(k) for _, k, _ in KNOWN], axis=1)
    expected = np.concatenate([column(r) for _, _, r in KNOWN], axis=1)
    assert (philox4x32(counters, keys) == expected).all()


def test_a_number_depends_on_its_own_position_only():
    whole = uniforms(7, 3, 0, 200)
    assert uniforms(7, 3, 64, 64).tolist() == whole[64:128].tolist()
    assert uniforms(7, 3, 199, 1)[0] == whole[199]


def test_seed_choice_and_position_all_matter():
    seen = {
        uniforms(seed, choice, position, 1)[0]
        for seed in (0, 1, 1 << 32, (1 << 64) - 1)
        for choice in (0, 1, 5)
        for position in (0, 1, 64, 1 << 20)
    }
    assert len(seen) == 4 * 3 * 4


def test_numbers_fill_the_unit_interval_evenly():
    numbers = np.concatenate([uniforms(seed, 0, 0, 1000) for seed in range(20)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.bincount((numbers * 16).astype(int), minlength=16)
    chi_square = ((counts - 1250) ** 2 / 1250).sum()
    assert chi_square < 37.7  # 0.999 quantile of 15 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
