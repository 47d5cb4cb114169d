"""Counts the pages that requests take: at decode instances, KVP workers and prefill instances.

The scheduler reserves pages before an instance takes them, so its count must be the instance's own
count to the page. With one page too few, two groups would wait for each other's pages in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.arithmetic import ceil_div
from millrace.core.kv.sp_layout import RING_BUFFERS, pages_taken
from millrace.core.request import Chunk

#: Lengths of prompts whose shares are remembered, since every round asks for all that wait.
MAX_REMEMBERED = 4096


def pages_for(tokens: int, page_tokens: int) -> int:
    """Returns the pages that tokens take at one instance; the last page may be partly filled."""
    return ceil_div(tokens, page_tokens)


def pages_of_request(
    prompt_tokens: int, max_new_tokens: int, choices: int, page_tokens: int
) -> int:
    """The pages that a decode instance reserves for a request from its placement to its end.

    With P prompt tokens, G new tokens at most, n choices and T tokens per page:

        floor(P / T)  +  n * (ceil((P + G) / T) - floor(P / T))

    The choices share the full pages of the prompt. Beyond these pages each choice has its own: the
    prompt's last, partly filled page (the first choice writes on in it, the others copy it) and the
    pages that its tokens grow into. The last token emitted is never fed back, so each choice has
    one spare slot.
    """
    shared = prompt_tokens // page_tokens
    own = ceil_div(prompt_tokens + max_new_tokens, page_tokens) - shared
    return shared + choices * own


def pages_of_plan(chunks: Sequence[Chunk], page_tokens: int, kv_layers: int) -> dict[str, int]:
    """The pages that the request takes at each member of its last group, with ring buffers."""
    last = chunks[-1]
    if len(last.instance_ids) == 1:
        return {last.instance_ids[0]: pages_for(last.start_token + last.num_tokens, page_tokens)}
    return pages_taken(chunks, page_tokens, kv_layers)


def pages_of_share(tokens: int, history: int, sp: int, page_tokens: int, kv_layers: int) -> int:
    """Returns the pages of the largest share, buffers included, where all `tokens` are one chunk.

    `history`: tokens before them, which are fetched from decode.
    """
    if sp == 1:
        return pages_for(history + tokens, page_tokens)
    fetched = pages_for(history, page_tokens)  # of the whole group
    own = ceil_div(tokens, sp)  # tokens of the first rank
    share = ceil_div(fetched, sp) + pages_for(own, page_tokens)
    return share + (RING_BUFFERS * ceil_div(share, kv_layers) if kv_layers else 0)


class Shares:
    """What a prompt as one chunk takes of each member of a group, for the degrees of a pool."""

    def __init__(self, degrees: Sequence[int], page_tokens: int, kv_layers: int) -> None:
        self._degrees = degrees
        self._page_tokens = page_tokens
        self._kv_layers = kv_layers
        self._found: dict[tuple[int, int], dict[int, int]] = {}

    def of(self, tokens: int, history: int) -> dict[int, int]:
        """Returns slots (pages as tokens) by SP degree."""
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
