from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.kv.prefix import block_hashes, prefix_root, reusable

BLOCK = 4
ROOT = prefix_root(BLOCK)
ids = st.lists(st.integers(0, 3), max_size=40)


def hashes(tokens: list[int], parent: int = ROOT) -> list[int]:
    return block_hashes(array("i", tokens), BLOCK, parent)


@settings(max_examples=60)
@given(ids, ids)
def test_as_many_hashes_agree_as_whole_blocks_do(one: list[int], other: list[int]) -> None:
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    agree = [a == b for a, b in zip(hashes(one), hashes(other), strict=False)]
    assert agree == [i < alike // BLOCK for i in range(len(agree))]


@given(ids, ids)
def test_a_chain_goes_on_where_it_was_left(one: list[int], other: list[int]) -> None:
    whole = one[: len(one) // BLOCK * BLOCK]
    first = hashes(whole)
    assert first + hashes(other, (first or [ROOT])[-1]) == hashes(whole + other)


@given(st.binary(max_size=200))
def test_hashes_fit_64_bits_and_need_whole_blocks(raw: bytes) -> None:
    found = block_hashes(raw, BLOCK, ROOT)
    assert len(found) == len(raw) // (4 * BLOCK)
    assert all(0 <= name < 2**64 for name in found)


def test_every_kind_of_array_gives_the_same() -> None:
    tokens = list(range(100, 117))
    as_numpy = np.array(tokens, dtype=np.int32)
    assert hashes(tokens) == block_hashes(as_numpy.data, BLOCK, ROOT)
    assert hashes(tokens) == block_hashes(as_numpy.tobytes(), BLOCK, ROOT)
    assert len(hashes(tokens)) == 4


def test_known_values_stay_as_they_are() -> None:
    """Proxies and instances of two releases must agree while a fleet is replaced."""
    assert prefix_root(64) == 0x8730A5230C2D11C2
    assert block_hashes(array("i", range(128)), 64, prefix_root(64)) == [
        0xA285C03690FFC6C9,
        0x15E5AB199D4D78FF,
    ]


def test_other_salts_and_block_sizes_share_nothing() -> None:
    roots = {prefix_root(BLOCK), prefix_root(BLOCK, "a"), prefix_root(BLOCK, "b"), prefix_root(8)}
    assert len(roots) == 4
    assert len({hashes([1] * BLOCK, root)[0] for root in roots}) == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_always_computed(tokens: int, blocks: int) -> None:
    assert len(reusable(hashes([0] * tokens), tokens, BLOCK)) == blocks
