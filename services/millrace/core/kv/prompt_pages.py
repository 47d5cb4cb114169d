"""Pages that prompts take of prefill instances, as `sequence_parallel` lays them out.

The scheduler gives pages away before anybody takes them, so its count must be that of the members
to the page: one too few, and two groups wait for each other's pages in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.arithmetic import ceil_div
from millrace.core.kv.sp_layout import RING_BUFFERS, pages_taken
from millrace.core.request import Chunk

#: Lengths of prompts whose shares are remembered: what waits is looked at in every round.
MAX_REMEMBERED = 4096


def pages_of_plan(chunks: Sequence[Chunk], page_tokens: int, kv_layers: int) -> dict[str, int]:
    """Pages that the request takes at each member of its last group, ring buffers included."""
    last = chunks[-1]
    if len(last.instance_ids) == 1:
        return {last.instance_ids[0]: ceil_div(last.start_token + last.num_tokens, page_tokens)}
    return pages_taken(chunks, page_tokens, kv_layers)


def pages_of_share(tokens: int, history: int, sp: int, page_tokens: int, kv_layers: int) -> int:
    """Pages of the largest share, buffers included, where all `tokens` are one chunk.

    `history`: tokens before them, which are fetched from decode.
    """
    if sp == 1:
        return ceil_div(history + tokens, page_tokens)
    fetched = (history + page_tokens - 1) // page_tokens  # pages, of the whole group
    own = (tokens + sp - 1) // sp  # tokens of the first rank
    share = (fetched + sp - 1) // sp + (own + page_tokens - 1) // page_tokens
    return share + (RING_BUFFERS * ceil_div(share, kv_layers) if kv_layers else 0)


class Shares:
    """What a prompt as one chunk takes of each member of a group, for the degrees of a pool."""

    def __init__(self, degrees: Sequence[int], page_tokens: int, kv_layers: int) -> None:
        self._degrees = degrees
        self._page_tokens = page_tokens
        self._kv_layers = kv_layers
        self._found: dict[tuple[int, int], dict[int, int]] = {}

    def of(self, tokens: int, history: int) -> dict[int, int]:
        """By SP degree, slots: pages as tokens."""
        found = self._found.get((tokens, history))
        if found is None:
            size, layers = self._page_tokens, self._kv_layers
            found = {
                sp: pages_of_share(tokens, history, sp, size, layers) * size for sp in self._degrees
            }
            if len(self._found) >= MAX_REMEMBERED:
                self._found.clear()
            self._found[tokens, history] = found
        return found
