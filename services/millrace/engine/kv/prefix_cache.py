"""Keeps KV in the pool for prompts that begin alike: blocks of whole pages, by their hashes.

A block's hash covers all tokens up to its end (`core.kv.prefix`). So a sequence's beginning is
looked up block by block until a block is missing. The blocks before a block are always there, too:
the scheduler relies on it. Requests read a block's pages and never write them: each request begins
its own KV in a page of its own.

Blocks that no request holds are idle. Their pages count as free in the pool, which evicts the least
recently used of them when it runs short. The last block of a sequence goes first. A block in use
may follow an idle one, which another request computed: it is forgotten with that one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millrace.core.errors import IntegrityError
from millrace.engine.kv.pool import KvPool

#: The most hashes in one `changes`: the rest waits for the next call.
MOST_CHANGES = 1 << 15


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """The changes since the last report. `whole`: every earlier report is void."""

    whole: bool
    added: list[int]
    removed: list[int]


@dataclass(slots=True, eq=False)
class _Block:
    hash: int
    before: int  # the hash of the block before it; 0: it is a first block
    place: int  # how many blocks come before it
    pages: list[int]
    after: set[_Block] = field(default_factory=set)  # the blocks that follow it


class PrefixCache:
    """The keeper of a pool's pages. Used by the thread that allocates them.

    Every call costs a few dictionary steps per block that it names, and per page.
    """

    def __init__(
        self, pool: KvPool, block_tokens: int, evicted: Callable[[int], object] = int
    ) -> None:
        """`block_tokens`: whole pages; 0: nothing is kept.

        `evicted` gets the number of evicted pages.

        Raises ValueError when a block would end inside a page.
        """
        page_tokens = pool.layout.page_tokens
        if block_tokens % page_tokens:
            raise ValueError(f"a block of {block_tokens} tokens ends in a page of {page_tokens}")
        self.block_tokens = block_tokens
        self._pool = pool
        self._block_pages = block_tokens // page_tokens
        self._blocks: dict[int, _Block] = {}
        self._at: dict[int, _Block] = {}  # by first page
        self._idle: OrderedDict[int, _Block] = OrderedDict()  # by hash, the next to go first
        self._whole = True
        self._added: dict[int, None] = {}  # not reported yet
        self._removed: dict[int, None] = {}
        self._evicted = evicted
        pool.serve(self)

    def __len__(self) -> int:
        """Returns the number of blocks, idle or not."""
        return len(self._blocks)

    @property
    def pages(self) -> int:
        """Returns the pages that are kept, idle or not."""
        return len(self._blocks) * self._block_pages

    def holds(self, hashes: Iterable[int]) -> int:
        """Returns how many first blocks of a sequence are in the cache."""
        found = 0
        for name in hashes:
            if name not in self._blocks:
                break
            found += 1
        return found

    def take(self, hashes: Sequence[int]) -> list[int]:
        """The pages of the first blocks of a sequence that are in the cache, in token order.

        Each page has one more reference, which the caller frees by `KvPool.free`.
        """
        found = [self._blocks[name] for name in hashes[: self.holds(hashes)]]
        pages = [page for block in found for page in block.pages]
        self._pool.share(pages)
        for block in found:
            self._idle.pop(block.hash, None)
        return pages

    def keep(self, hashes: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the first blocks of a sequence, whose KV is whole in the first of `pages`.

        The caller holds these pages, and keeps holding them. Blocks already in the cache stay as
        they are. Raises IntegrityError for pages without a holder.
        """
        each = self._block_pages
        if len(pages) < len(hashes) * each:
            raise IntegrityError(f"{len(hashes)} blocks don't fit {len(pages)} pages")
        fresh: dict[int, _Block] = {}
        for place, (before, name) in enumerate(pairwise((0, *hashes))):
            if name not in self._blocks and name not in fresh:
                own = list(pages[place * each : (place + 1) * each])
                fresh[name] = _Block(name, before, place, own)
        self._pool.keep([page for block in fresh.values() for page in block.pages])
        for block in fresh.values():
            self._blocks[block.hash] = block
            self._at[block.pages[0]] = block
            if block.place:
                self._blocks[block.before].after.add(block)
            _change(block.hash, undone=self._removed, done=self._added)
        for name in reversed(hashes):
            if name in self._idle:  # as if it had been taken
                self._idle.move_to_end(name)

    def changes(self) -> CacheChanges:
        """Returns the changes since the last call, or the first part of them."""
        whole, self._whole = self._whole, False
        removed = _first(self._removed, MOST_CHANGES)
        added = _first(self._added, MOST_CHANGES - len(removed))
        return CacheChanges(whole, added, removed)

    def report_all(self) -> None:
        """Makes the next changes begin again with all blocks: the receiver has forgotten
        everything."""
        self._whole = True
        self._added = dict.fromkeys(self._blocks)
        self._removed.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError when indexes, order and the pool's record disagree."""
        pages = [page for block in self._blocks.values() for page in block.pages]
        if len(set(pages)) != len(pages):
            raise IntegrityError("prefix cache: two blocks have a page in common")
        if self._at.keys() != {block.pages[0] for block in self._blocks.values()}:
            raise IntegrityError("prefix cache: the index of pages is not the blocks'")
        for block in self._blocks.values():
            alone = {self._pool.references(page) == 1 for page in block.pages}
            if alone != {block.hash in self._idle}:
                raise IntegrityError(f"prefix cache: pages {block.pages} are idle in part")
            before = self._blocks.get(block.before)
            if block.place and (before is None or block not in before.after):
                raise IntegrityError(f"prefix cache: block {block.place} follows no block")
        if len(self._idle) * self._block_pages != self._pool.idle_pages:
            raise IntegrityError(
                f"prefix cache: {len(self._idle)} blocks are idle, {self._pool.idle_pages} pages"
            )

    # -- calls of the pool

    def idle(self, pages: Sequence[int]) -> None:
        """Notes that a request has let go of blocks, which counts as a use.

        The last block of each sequence is the next to be evicted. The idle blocks before them are
        used, too: they may be another request's computation of the same tokens."""
        used = {self._at[page].hash: self._at[page] for page in pages if page in self._at}
        for block in list(used.values()):
            name = block.before
            while name in self._idle and name not in used:
                used[name] = self._idle[name]
                name = used[name].before
        for block in sorted(used.values(), key=lambda block: block.place, reverse=True):
            self._idle[block.hash] = block
            self._idle.move_to_end(block.hash)

    def evict(self, count: int) -> None:
        given_up: list[int] = []
        freed = 0
        while freed < count:
            for block in self._with_following(next(iter(self._idle.values()))):
                freed += len(block.pages) if block.hash in self._idle else 0
                given_up += block.pages
                self._forget(block)
        self._pool.give_up(given_up)
        self._evicted(freed)

    def _with_following(self, block: _Block) -> list[_Block]:
        """Lists the block and all blocks after it, each after those that follow it."""
        found = [block]
        for one in found:
            found += one.after
        return found[::-1]

    def _forget(self, block: _Block) -> None:
        del self._blocks[block.hash]
        del self._at[block.pages[0]]
        self._idle.pop(block.hash, None)
        if block.place:
            self._blocks[block.before].after.discard(block)
        _change(block.hash, undone=self._added, done=self._removed)


def _change(name: int, *, undone: dict[int, None], done: dict[int, None]) -> None:
    """Notes a change. A change that is undone before a report is left out of the report."""
    if name in undone:
        del undone[name]
    else:
        done[name] = None


def _first(names: dict[int, None], most: int) -> list[int]:
    """Removes and returns the first `most`."""
    taken = list(names)[:most]
    if len(taken) == len(names):
        names.clear()
    else:
        for name in taken:
            del names[name]
    return taken
