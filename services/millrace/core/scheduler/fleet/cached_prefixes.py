"""The first tokens of prompts in an instance's prefix cache, by its own reports.

Blocks are named by chained hashes (`kv.prefix`), and a cache evicts no block that another block
follows. So where block i is cached, the blocks before it are cached, too, and a binary search finds
the last cached block. Reports are a little old: an instance that has evicted a prefix meanwhile
computes it, or reports that it can't take the prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from millrace.core.scheduler.events import InstanceJoined
from millrace.core.scheduler.reports import CachedBlocks


class CachedPrefixes:
    """One instance's blocks."""

    __slots__ = ("_blocks", "_most", "block_tokens")

    def __init__(self, card: InstanceJoined) -> None:
        self.block_tokens = card.block_tokens  # 0: it keeps none
        self._most = card.kv_pages  # a block has a page at least
        self._blocks: set[int] = set()

    def heard(self, cached: CachedBlocks) -> None:
        """Takes a report in. Forgets all blocks if they exceed the pages: a report was lost."""
        if not self.block_tokens:
            return
        if cached.whole:
            self._blocks.clear()
        self._blocks.update(cached.added)
        self._blocks.difference_update(cached.removed)
        if len(self._blocks) > self._most:
            self._blocks.clear()

    def tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """The cached first tokens of a prompt with these blocks, but never its last token."""
        blocks = self._blocks
        if not blocks or not hashes or hashes[0] not in blocks:
            return 0
        most = min(len(hashes), (prompt_tokens - 1) // self.block_tokens)
        lacking = bisect_left(range(most), True, key=lambda index: hashes[index] not in blocks)
        return lacking * self.block_tokens
