from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.core.errors import CapacityError, IntegrityError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv import prefix_cache
from millrace.engine.kv.pool import KvPool, page_runs
from millrace.engine.kv.prefix_cache import PrefixCache

PAGE = 2
BLOCK = 4  # two pages
PAGES = 20


def make_pool(num_pages: int = PAGES) -> KvPool:
    layout = KvLayout(
        model_hash="m",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        page_tokens=PAGE,
        head_start=0,
        head_count=1,
        num_pages=num_pages,
    )
    return KvPool(layout)


def kept(cache: PrefixCache, hashes: Iterable[int]) -> set[int]:
    """Returns the hashes of the blocks that are in the cache."""
    return {name for name in hashes if cache.holds([name])}


class Scheduler:
    """Collects the reported changes."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.knows: set[int] = set()

    def hear(self) -> None:
        changes = self._cache.changes()
        if changes.whole:
            self.knows.clear()
        assert not self.knows & set(changes.added) and self.knows >= set(changes.removed)
        self.knows = (self.knows | set(changes.added)) - set(changes.removed)


class CacheMachine(RuleBasedStateMachine):
    """Requests with prompts of a small tree of prefixes: each block's pages hold its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.cache = PrefixCache(self.pool, BLOCK)
        self.scheduler = Scheduler(self.cache)
        self.running: list[tuple[list[int], list[int]]] = []  # hashes, pages

    #: A block is named by the path to it.
    names = tuple(int("".join(path)) for n in range(1, 6) for path in product("12", repeat=n))
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(
        lambda path: [int("".join(map(str, path[: i + 1]))) for i in range(len(path))]
    )

    @rule(names=prompts)
    def begin(self, names: list[int]) -> None:
        shared = self.cache.take(names)
        assert len(shared) == 2 * self.cache.holds(names)
        for i, name in enumerate(names[: len(shared) // 2]):
            written = self.pool.storage[0, shared[2 * i : 2 * i + 2]]
            assert (written == name).all()
        more = 2 * len(names) + 1 - len(shared)
        if self.pool.free_pages < more:
            with pytest.raises(CapacityError):
                self.pool.allocate(more)
            self.pool.free(shared)
            return
        own = self.pool.allocate(more)
        assert not set(own) & set(shared)
        pages = shared + own
        for i, name in enumerate(names):
            if 2 * i >= len(shared):
                self.pool.storage[0, pages[2 * i : 2 * i + 2]] = name
        self.running.append((names, pages))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        names, pages = data.draw(st.sampled_from(self.running))
        self.cache.keep(names, pages)
        assert self.cache.holds(names) == len(names)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        self.pool.free(self.running.pop(at)[1])

    @rule()
    def hear(self) -> None:
        self.scheduler.hear()
        assert (
            len(self.scheduler.knows)
            == len(self.cache)
            == len(kept(self.cache, self.scheduler.knows))
        )

    @rule()
    def register_anew(self) -> None:
        self.cache.report_all()

    @invariant()
    def book_agrees(self) -> None:
        used = {page for _, pages in self.running for page in pages}
        self.pool.check_integrity(expected_used=len(used))
        self.cache.check_integrity()

    @invariant()
    def a_block_follows_all_blocks_before_it(self) -> None:
        """The scheduler looks for the last cached block by a binary search."""
        found = kept(self.cache, self.names)
        assert all(name // 10 in found for name in found if name > 2)

    @invariant()
    def all_that_counts_as_free_can_be_had(self) -> None:
        used = {page for _, pages in self.running for page in pages}
        assert self.pool.free_pages == PAGES - len(used)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=30)


def computed(pool: KvPool, cache: PrefixCache, names: list[int]) -> list[int]:
    """A request comes, is computed and ends."""
    pages = cache.take(names)
    pages += pool.allocate(2 * len(names) - len(pages))
    cache.keep(names, pages)
    pool.free(pages)
    return pages


def test_the_least_recently_used_goes_first_and_a_sequence_from_its_end() -> None:
    pool, evicted = make_pool(), list[int]()
    cache = PrefixCache(pool, BLOCK, evicted.append)
    computed(pool, cache, [1, 2, 3])
    computed(pool, cache, [1, 2, 4])
    computed(pool, cache, [5, 6])
    computed(pool, cache, [1, 2, 3])  # used again
    held = pool.allocate(PAGES - 12)
    assert len(cache) == 6
    gone = []
    while len(cache):
        before = kept(cache, range(1, 7))
        held += pool.allocate(1)
        gone += sorted(before - kept(cache, range(1, 7)))
        held += pool.allocate(1)  # the other page of its block
    assert gone == [4, 6, 5, 3, 2, 1]
    assert evicted == [2] * 6
    pool.free(held)


def test_what_was_computed_twice_goes_from_its_end_too() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    first = pool.allocate(2)
    second = pool.allocate(4)  # the same first block: computed before the other one was kept
    cache.keep([1], first)
    cache.keep([1, 2], second)
    pool.free(first)
    pool.free(second)
    pool.allocate(pool.free_pages - 2)
    assert kept(cache, [1, 2]) == {1}


def test_a_block_goes_before_the_one_that_it_follows_whoever_computed_it() -> None:
    """Two requests computed blocks 1 and 2 at the same time; the second one read block 1 of the
    first one, and lets go of it after block 2 had become idle."""
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    computed(pool, cache, [1])
    first, second = (cache.take([1]) + pool.allocate(4) for _ in range(2))
    cache.keep([1, 2, 3], first)
    cache.keep([1, 2, 4], second)
    pool.free(first)
    pool.free(second)
    pool.allocate(PAGES - 4)
    assert kept(cache, range(1, 5)) == {1, 2}
    pool.allocate(2)
    assert kept(cache, range(1, 5)) == {1}


def test_a_block_in_use_is_forgotten_with_the_one_that_it_follows() -> None:
    """A request holds a copy of its own of the block before."""
    pool, evicted = make_pool(), list[int]()
    cache = PrefixCache(pool, BLOCK, evicted.append)
    first, second = pool.allocate(2), pool.allocate(6)
    cache.keep([1], first)
    cache.keep([1, 2, 3], second)
    pool.free(first)
    held = pool.allocate(PAGES - 6)  # block 1 is all that is idle
    assert not kept(cache, range(1, 4)) and evicted == [2]
    cache.keep([1, 2, 3], second)
    pool.free(second)
    assert kept(cache, range(1, 4)) == {1, 2, 3}
    pool.check_integrity(expected_used=len(held))


def test_a_block_in_use_is_not_evicted() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    computed(pool, cache, [1, 2])
    taken = cache.take([1])
    pool.allocate(PAGES - 2)
    assert kept(cache, [1, 2]) == {1}
    with pytest.raises(CapacityError, match="1 KV pages wanted, 0 are free"):
        pool.allocate(1)
    pool.free(taken)
    assert pool.free_pages == 2


def test_an_idle_cache_is_no_use_of_the_pool() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    pages = computed(pool, cache, [1, 2])
    pool.check_integrity(expected_used=0)
    assert (pool.free_pages, pool.used_pages, pool.idle_pages) == (PAGES, 0, 4)
    with pytest.raises(IntegrityError, match="freed more often"):
        pool.free(pages[:1])
    with pytest.raises(IntegrityError, match="is kept already"):
        pool.keep(pages[:1])
    pool.check_integrity(expected_used=0)


def test_what_is_evicted_comes_back_as_one_run() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    for start in range(1, 11, 5):
        computed(pool, cache, list(range(start, start + 5)))
    assert pool.idle_pages == PAGES
    assert len(page_runs(pool.allocate(10))) == 1


def test_two_blocks_of_one_name_are_one() -> None:
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    computed(pool, cache, [1, 2, 1])
    cache.check_integrity()
    pool.check_integrity(expected_used=0)
    assert len(cache) == 2


def test_blocks_are_whole_pages_and_need_theirs() -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="a block of 3 tokens ends in a page of 2"):
        PrefixCache(pool, 3)
    cache = PrefixCache(pool, BLOCK)
    pages = pool.allocate(3)
    with pytest.raises(IntegrityError, match="2 blocks don't fit 3 pages"):
        cache.keep([1, 2], pages)
    with pytest.raises(ValueError, match="a keeper already"):
        PrefixCache(pool, BLOCK)


def test_long_news_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MOST_CHANGES", 3)
    pool = make_pool()
    cache = PrefixCache(pool, BLOCK)
    scheduler = Scheduler(cache)
    computed(pool, cache, [1, 2, 3, 4, 5])
    assert cache.changes().whole
    cache.report_all()
    scheduler.hear()
    assert scheduler.knows == {1, 2, 3}
    pool.free(pool.allocate(PAGES))  # all are evicted, two of them before they were reported
    scheduler.hear()
    assert not scheduler.knows
    assert not cache.changes().added
