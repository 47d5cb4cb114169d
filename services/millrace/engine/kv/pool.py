"""The paged KV cache of one rank: one contiguous allocation and the record of each page's holders.

Layout as in `millrace.core.kv.layout`: ``[num_layers, num_pages, 2, head_count, page_tokens,
head_dim]``. A page number names the same page of every layer. Pages are counted references, so that
several sequences may read one page; a writer that shares a page copies it first.

Free pages are kept as extents (runs of neighbouring numbers) in three indexes: by start, by end,
and sorted by length. Allocation takes the smallest extent that fits whole (best fit), so that a
request's pages are one run wherever possible and its KV moves in few descriptors.

A keeper (the prefix cache) may hold a reference of its own to pages whose content later requests
may read. Pages that only the keeper holds are idle: they count as free, and are taken from the
keeper when the free pages do not suffice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from millrace.core.errors import CapacityError, IntegrityError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.host_memory import host_zeros


class PageExtents:
    """A set of page numbers kept as maximal runs.

    Each call costs O(log runs) per run that it touches.
    """

    def __init__(self, num_pages: int) -> None:
        self._length_at: dict[int, int] = {}  # start -> length
        self._start_before: dict[int, int] = {}  # one past the end -> start
        self._by_length: list[tuple[int, int]] = []  # sorted (length, start)
        self.num_pages = 0
        self.add_run(0, num_pages)

    def add_run(self, start: int, length: int) -> None:
        """Adds pages ``[start, start + length)``, none of which is in the set."""
        self.num_pages += length
        before = self._start_before.get(start)
        if before is not None:
            length += start - before
            start = before
            self._drop(start)
        after = self._length_at.get(start + length)
        if after is not None:
            self._drop(start + length)
            length += after
        self._keep(start, length)

    def take(self, count: int) -> list[int]:
        """Removes `count` pages, ascending, in as few runs as possible. The set must hold them."""
        runs: list[tuple[int, int]] = []
        while count:
            at = bisect_left(self._by_length, (count, 0))
            length, start = self._by_length[min(at, len(self._by_length) - 1)]
            taken = min(count, length)
            self._drop(start)
            if taken < length:
                self._keep(start + taken, length - taken)
            runs.append((start, taken))
            self.num_pages -= taken
            count -= taken
        return [page for start, length in sorted(runs) for page in range(start, start + length)]

    def runs(self) -> list[tuple[int, int]]:
        """Returns (start, length) of every run, ascending by start."""
        return sorted(self._length_at.items())

    def check(self) -> None:
        """Raises IntegrityError when the three indexes disagree or runs touch or overlap."""
        runs = self.runs()
        if sorted((length, start) for start, length in runs) != self._by_length:
            raise IntegrityError("free pages: the length index differs from the start index")
        if {start + length: start for start, length in runs} != self._start_before:
            raise IntegrityError("free pages: the end index differs from the start index")
        if sum(length for _, length in runs) != self.num_pages:
            raise IntegrityError(f"free pages: runs do not add up to {self.num_pages}")
        for (start, length), (following, _) in pairwise(runs):
            if start + length >= following:
                raise IntegrityError(f"free pages: run at {start} reaches the one at {following}")

    def _keep(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_length, (length, start))

    def _drop(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]


class PageKeeper(Protocol):
    """Holds pages for their content, until the pool needs them."""

    def idle(self, pages: Sequence[int]) -> None:
        """Notes that the last holder beside the keeper has freed these pages."""

    def evict(self, count: int) -> None:
        """Gives up at least `count` idle pages (`KvPool.give_up`); there are at least that many."""


class KvPool:
    """Pages of one rank. Not thread-safe: one thread allocates and frees."""

    def __init__(
        self,
        layout: KvLayout,
        device: torch.device | str = "cpu",
        storage: torch.Tensor | None = None,
    ) -> None:
        """Allocates `layout.pool_bytes` of zeros on `device`, or takes `storage` of that shape.

        Zeros, so that rows never written can't hold NaN. Raises CapacityError when the device has
        no room.
        """
        self.layout = layout
        shape = (
            layout.num_layers,
            layout.num_pages,
            2,
            layout.head_count,
            layout.page_tokens,
            layout.head_dim,
        )
        try:
            if storage is None:
                storage = _zeros(shape, getattr(torch, layout.dtype), torch.device(device))
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"no room for a KV pool of {layout.pool_bytes} bytes "
                f"({layout.num_pages} pages) on {device}"
            ) from error
        self.storage = storage
        self._layers = tuple(storage.unbind(0))
        self._free = PageExtents(layout.num_pages)
        self._references = [0] * layout.num_pages
        self._kept = bytearray(layout.num_pages)  # 1: one of the references is the keeper's
        self._idle_pages = 0
        self._keeper: PageKeeper | None = None

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages

    @property
    def free_pages(self) -> int:
        """Returns the pages that can be allocated: they have no holder, or the keeper alone."""
        return self._free.num_pages + self._idle_pages

    @property
    def idle_pages(self) -> int:
        """Returns the pages that only the keeper holds."""
        return self._idle_pages

    @property
    def used_pages(self) -> int:
        """Returns the pages with at least one holder beside the keeper."""
        return self.num_pages - self.free_pages

    def layer(self, index: int) -> torch.Tensor:
        """Returns a view ``[num_pages, 2, head_count, page_tokens, head_dim]`` of one layer."""
        return self._layers[index]

    def references(self, page: int) -> int:
        """Returns how many holders a page has."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages with one reference each, ascending, in as few runs as possible.

        Raises CapacityError, and takes nothing, when fewer are free.
        """
        if count < 0:
            raise ValueError(f"allocate({count}): a count can't be negative")
        if count > self.free_pages:
            raise CapacityError(f"{count} KV pages wanted, {self.free_pages} are free")
        if count > self._free.num_pages and self._keeper is not None:
            self._keeper.evict(count - self._free.num_pages)
        pages = self._free.take(count)
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page. Raises IntegrityError for a page without a holder."""
        held = list(pages)
        self.require_held(held)
        for page in held:
            self._idle_pages -= self._is_idle(page)
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drops a reference of each page; pages without any are free again.

        Raises IntegrityError, and frees nothing, when a page is freed more often than it is held.
        """
        dropped = sorted(pages)
        self.require_held(dropped)
        references, kept = self._references, self._kept
        for page, count in Counter(dropped).items():
            if references[page] - kept[page] < count:
                raise IntegrityError(f"KV page {page} is freed more often than it is held")
        released: list[int] = []
        idle: list[int] = []
        for page in dropped:
            references[page] = left = references[page] - 1
            if left == 0:
                released.append(page)
            elif left == kept[page]:
                idle.append(page)
        self._release(released)
        if idle and self._keeper is not None:
            self._idle_pages += len(idle)
            self._keeper.idle(idle)

    # -- for the keeper

    def serve(self, keeper: PageKeeper) -> None:
        """Sets the keeper of the pool's pages; a pool has at most one."""
        if self._keeper is not None:
            raise ValueError("the pool has a keeper already")
        self._keeper = keeper

    def keep(self, pages: Sequence[int]) -> None:
        """Adds the keeper's reference to each page, which has a holder and is not yet kept.

        Raises IntegrityError, and keeps nothing, for other pages.
        """
        self.require_held(pages)
        if kept := [page for page in pages if self._kept[page]]:
            raise IntegrityError(f"KV page {kept[0]} is kept already")
        for page in pages:
            self._references[page] += 1
            self._kept[page] = 1

    def give_up(self, pages: Iterable[int]) -> None:
        """Drops the keeper's reference; pages that were idle are free."""
        released = []
        for page in sorted(pages):
            if not self._kept[page]:
                raise IntegrityError(f"KV page {page} is not kept")
            idle = self._is_idle(page)
            self._idle_pages -= idle
            self._kept[page] = 0
            self._references[page] -= 1
            if idle:
                released.append(page)
        self._release(released)

    # -- both

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's K and V of all layers, for copy on write."""
        self.require_held((source, target))
        self.copy_unchecked(source, target)

    def copy_unchecked(self, source: int, target: int) -> None:
        """Copies a page as `copy_page` does, in a process whose leader has the record of pages."""
        self.storage[:, target].copy_(self.storage[:, source])

    def check_integrity(self, expected_used: int | None = None) -> None:
        """Raises IntegrityError when a page leaked, is used twice, or use differs from expected."""
        self._free.check()
        free = [page for start, n in self._free.runs() for page in range(start, start + n)]
        unheld = [page for page, count in enumerate(self._references) if count == 0]
        if any(count < 0 for count in self._references):
            raise IntegrityError("a KV page has a negative reference count")
        if free != unheld:
            odd = sorted(set(free) ^ set(unheld))[:8]
            raise IntegrityError(f"KV pages neither held nor free, or both: {odd}")
        idle = sum(self._is_idle(page) for page in range(self.num_pages))
        if idle != self._idle_pages:
            raise IntegrityError(f"{idle} KV pages are idle, {self._idle_pages} are counted")
        if expected_used is not None and self.used_pages != expected_used:
            raise IntegrityError(
                f"{self.used_pages} KV pages are in use, {expected_used} should be"
            )

    def _is_idle(self, page: int) -> bool:
        return self._references[page] == self._kept[page] == 1

    def _release(self, pages: Iterable[int]) -> None:
        for start, length in page_runs(pages):
            self._free.add_run(start, length)

    def require_held(self, pages: Sequence[int]) -> None:
        """Raises IntegrityError for a page that has no holder."""
        references, num_pages = self._references, len(self._references)
        for page in pages:
            if not 0 <= page < num_pages or references[page] == 0:
                raise IntegrityError(f"KV page {page} is not held by anyone")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates zeros.

    On the host a large pool takes neither start-up time nor memory before its use.
    """
    if device.type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def page_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (start, length) of each run of neighbouring numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
