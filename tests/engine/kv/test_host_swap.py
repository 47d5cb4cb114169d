"""Pages of KV in host memory and back: the same bytes, in any pages and slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import CapacityError, IntegrityError
from millrace.engine.kv.host_swap import KvSwap

PAGES = 12


def storage(ranks: int = 0) -> torch.Tensor:
    """Returns the storage of one rank, or of several one after the other."""
    shape = (ranks, 3, PAGES, 2, 1, 8, 4) if ranks else (3, PAGES, 2, 2, 8, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


PAGE_BYTES = 3 * 2 * 2 * 8 * 4 * 2
PICKED = st.lists(st.integers(0, PAGES - 1), unique=True, min_size=1)


@given(st.sampled_from([0, 2]), st.lists(PICKED, min_size=1, max_size=4), st.randoms())
@settings(max_examples=60)
def test_pages_come_back_as_they_were(ranks, groups, random):
    kv = storage(ranks)
    swap = KvSwap(kv, 40 * PAGE_BYTES, PAGE_BYTES)
    assert swap.num_pages == 40
    away = []
    for pages in groups:
        if len(pages) > swap.free_pages:
            continue
        slots = swap.reserve(len(pages))
        swap.swap_out(pages, slots)
        away.append((slots, picked(kv, pages)))
        if random.random() < 0.5:  # slots in any order and state
            gone, _ = away.pop(random.randrange(len(away)))
            swap.release(gone)
        swap.check_integrity(expected_used=sum(len(slots) for slots, _ in away))
    kv.zero_()
    for slots, was in away:
        pages = random.sample(range(PAGES), len(slots))
        swap.swap_in(slots, pages)
        assert torch.equal(picked(kv, pages), was)
        swap.release(slots)
    swap.check_integrity(expected_used=0)
    assert swap.used_bytes == 0


def picked(kv: torch.Tensor, pages: list[int]) -> torch.Tensor:
    return kv.index_select(kv.dim() - 5, torch.tensor(pages)).clone()


def test_what_does_not_fit_takes_nothing():
    swap = KvSwap(storage(), 5 * PAGE_BYTES - 1, PAGE_BYTES)
    assert swap.free_pages == 4
    swap.reserve(3)
    with pytest.raises(CapacityError, match="2 pages of swap wanted, 1 are free"):
        swap.reserve(2)
    assert swap.used_bytes == 3 * PAGE_BYTES
    with pytest.raises(IntegrityError, match="3 pages of swap are in use, 0 should be"):
        swap.check_integrity(expected_used=0)


def test_no_memory_no_room():
    assert KvSwap(storage(), 0, PAGE_BYTES).free_pages == 0
