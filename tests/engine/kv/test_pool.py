from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.core.errors import CapacityError, IntegrityError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.pool import KvPool, page_runs

PAGES = 24


def make_pool(num_pages: int = PAGES, dtype: str = "float32") -> KvPool:
    layout = KvLayout(
        model_hash="m",
        dtype=dtype,
        num_layers=2,
        num_kv_heads=3,
        head_dim=4,
        page_tokens=5,
        head_start=0,
        head_count=3,
        num_pages=num_pages,
    )
    return KvPool(layout)


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, share and free keeps the pool's record equal to a plain counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, PAGES + 2))
    def allocate(self, count: int) -> None:
        room = PAGES - len(self.held)
        if count > room:
            with pytest.raises(CapacityError, match=f"{count} KV pages wanted, {room} are free"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count and pages == sorted(pages)
        assert not self.held.keys() & set(pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.share(pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(pages)
        self.held -= Counter(pages)

    @rule(data=st.data())
    def touching_a_page_nobody_holds_changes_nothing(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(-2, PAGES + 2).filter(lambda p: p not in self.held))
        held = sorted(self.held)[:1]
        for refused in (self.pool.free, self.pool.share):
            with pytest.raises(IntegrityError, match=f"KV page {page} is not held"):
                refused([*held, page])

    @invariant()
    def book_agrees(self) -> None:
        self.pool.check_integrity(expected_used=len(self.held))
        assert self.pool.free_pages == PAGES - len(self.held)
        assert [self.pool.references(p) for p in range(PAGES)] == [
            self.held[p] for p in range(PAGES)
        ]

    @invariant()
    def a_run_that_fits_is_given_whole(self) -> None:
        longest = max(
            (n for _, n in page_runs(sorted(set(range(PAGES)) - set(self.held)))), default=0
        )
        if longest:
            pages = self.pool.allocate(longest)
            assert len(page_runs(pages)) == 1
            self.pool.free(pages)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_layers_are_views_of_one_allocation() -> None:
    pool = make_pool()
    assert pool.storage.is_contiguous()
    assert pool.storage.shape == (2, PAGES, 2, 3, 5, 4)
    pool.layer(1)[7, 1, 2, 4, 3] = 9.0
    assert pool.storage[1, 7, 1, 2, 4, 3] == 9.0
    assert pool.storage.numel() * 4 == pool.layout.pool_bytes


def test_copy_page_copies_every_layer_and_leaves_the_source() -> None:
    pool = make_pool(dtype="bfloat16")
    source, target = pool.allocate(2)
    pool.storage[:, source] = torch.randn_like(pool.storage[:, source])
    before = pool.storage[:, source].clone()
    pool.copy_page(source, target)
    assert torch.equal(pool.storage[:, target], before)
    assert torch.equal(pool.storage[:, source], before)
    pool.free([target])
    with pytest.raises(IntegrityError):
        pool.copy_page(source, target)


def test_freeing_a_page_twice_in_one_call_is_found_and_changes_nothing() -> None:
    pool = make_pool()
    pages = pool.allocate(3)
    with pytest.raises(IntegrityError, match="more often than it is held"):
        pool.free([pages[0], pages[1], pages[1]])
    pool.check_integrity(expected_used=3)


def test_best_fit_keeps_the_long_run_for_a_long_request() -> None:
    pool = make_pool()
    first, _gap, _rest = pool.allocate(4), pool.allocate(1), pool.allocate(3)
    pool.free(first)
    assert pool.allocate(3) == first[:3]
    assert len(page_runs(pool.allocate(16))) == 1


def test_fragments_are_used_when_no_run_fits() -> None:
    pool = make_pool()
    pages = pool.allocate(PAGES)
    pool.free(pages[::2])
    assert pool.allocate(PAGES // 2) == pages[::2]
    with pytest.raises(CapacityError):
        pool.allocate(1)


def test_check_integrity_finds_leaks_and_damage() -> None:
    pool = make_pool()
    pool.allocate(2)
    with pytest.raises(IntegrityError, match="2 KV pages are in use, 0 should be"):
        pool.check_integrity(expected_used=0)
    pool._references[0] = 0
    with pytest.raises(IntegrityError, match=r"neither held nor free, or both: \[0\]"):
        pool.check_integrity()


def test_negative_counts_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        make_pool().allocate(-1)
    with pytest.raises(CapacityError, match="no room for a KV pool of"):
        make_pool(num_pages=1 << 50)
