"""Which first tokens of a prompt an instance has in its prefix cache, by what it says of it.

Blocks go by chained hashes (`prefix`), and a cache evicts none that another follows. So where block
i is there, those before it are, too, and looking for the last one takes a logarithm of steps. News
comes with heartbeats and is a little old: whoever is given a prompt for what it no longer has says
so, or computes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from millrace.core.scheduler.events import CachedBlocks, InstanceJoined


class CachedPrefixes:
    """One instance's blocks."""

    __slots__ = ("_blocks", "_most", "block_tokens")

    def __init__(self, card: InstanceJoined) -> None:
        self.block_tokens = card.block_tokens  # 0: it keeps none
        self._most = card.kv_pages  # a block has a page at least
        self._blocks: set[int] = set()

    def heard(self, cached: CachedBlocks) -> None:
        """What changed. More blocks than the instance has pages are none: news was lost."""
        if not self.block_tokens:
            return
        if cached.whole:
            self._blocks.clear()
        self._blocks.update(cached.added)
        self._blocks.difference_update(cached.removed)
        if len(self._blocks) > self._most:
            self._blocks.clear()

    def tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """First tokens that are there of a prompt with these blocks, but never its last token."""
        blocks = self._blocks
        if not blocks or not hashes or hashes[0] not in blocks:
            return 0
        most = min(len(hashes), (prompt_tokens - 1) // self.block_tokens)
        lacking = bisect_left(range(most), True, key=lambda index: hashes[index] not in blocks)
        return lacking * self.block_tokens
