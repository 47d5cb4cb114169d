"""Where a token range's K and V lie at the sender and where they belong at the receiver.

Both sides may differ in page size, page order and the heads they hold. Nothing assumes whole
pages: a piece ends where either side's page ends, and neighbours are joined afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.core.kv_layout import KvLayout
from millrace.transfer.runs import Offsets, Runs


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One end of a transfer: a pool and a request's pages in it, in token order.

    `first_token` is the token that lies in row 0 of ``pages[0]``.
    """

    layout: KvLayout
    pages: npt.NDArray[np.int64]
    first_token: int = 0

    @staticmethod
    def of(layout: KvLayout, pages: Sequence[int], prompt_tokens: int) -> Side:
        """Raises ValueError when the pages don't hold the prompt or aren't the pool's."""
        array = np.asarray(pages, dtype=np.int64)
        if len(array) < layout.pages_for(prompt_tokens):
            raise ValueError(
                f"{len(array)} pages of {layout.page_tokens} tokens can't hold a prompt of "
                f"{prompt_tokens} tokens"
            )
        if len(array) and (array.min() < 0 or array.max() >= layout.num_pages):
            raise ValueError(f"a page lies outside the pool of {layout.num_pages} pages")
        return Side(layout, array)

    def rows(self, tokens: Offsets) -> tuple[Offsets, Offsets]:
        """(byte offset of each token's page, the token's row in it). int64 [tokens] both."""
        index, row = np.divmod(tokens - self.first_token, self.layout.page_tokens)
        return self.pages[index] * self.layout.page_bytes, row


def mismatch(sender: KvLayout, receiver: KvLayout) -> str:
    """Why KV of `sender` can't live at `receiver`; empty when it can. Names both values."""
    for name in ("model_hash", "dtype", "num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(receiver, name), getattr(sender, name)
        if ours != theirs:
            return f"{name} differs: the sender has {theirs!r}, the receiver {ours!r}"
    if shared_heads(sender, receiver) is None:
        return (
            f"no common heads: the sender has {sender.head_start}..{sender.head_end - 1}, the "
            f"receiver {receiver.head_start}..{receiver.head_end - 1}"
        )
    return ""


def shared_heads(one: KvLayout, other: KvLayout) -> tuple[int, int] | None:
    """(first, count) of the heads that both hold, or None."""
    first = max(one.head_start, other.head_start)
    count = min(one.head_end, other.head_end) - first
    return (first, count) if count > 0 else None


def layer_runs(sender: Side, receiver: Side, start_token: int, num_tokens: int) -> Runs:
    """Runs of layer 0 that carry tokens ``[start_token, start_token + num_tokens)``.

    Of the heads that both sides hold; coalesced. Offsets count from each pool's start; a later
    layer's are `at_layer` of these. Needs no loop over tokens: 1M tokens take tens of
    milliseconds.
    """
    heads = shared_heads(sender.layout, receiver.layout)
    if heads is None or num_tokens == 0:
        return Runs(*(np.empty(0, dtype=np.int64),) * 3)
    starts = _cuts(sender, receiver, start_token, num_tokens)
    lengths = np.diff(starts, append=start_token + num_tokens)
    source, target = (
        _addresses(side, starts, heads[0], heads[1]).reshape(-1) for side in (sender, receiver)
    )
    row_bytes = sender.layout.row_bytes
    return Runs(source, target, np.repeat(lengths * row_bytes, 2 * heads[1])).coalesced()


def at_layer(runs: Runs, sender: KvLayout, receiver: KvLayout, layer: int) -> Runs:
    """The runs of `layer`, given those of layer 0."""
    return runs.shifted(layer * sender.layer_bytes, layer * receiver.layer_bytes)


def packed(sender: KvLayout, receiver: KvLayout, start_token: int, num_tokens: int) -> Side:
    """A piece of a staging slot that holds just this token range of one layer, tightly.

    Whole pages of the receiver lie in it as they will in the pool, so that they move in one piece;
    any other range is a single page of its own size.
    """
    heads = shared_heads(sender, receiver)
    if heads is None:
        raise ValueError(mismatch(sender, receiver))
    whole = start_token % receiver.page_tokens == num_tokens % receiver.page_tokens == 0
    page_tokens = receiver.page_tokens if whole else num_tokens
    layout = KvLayout(
        model_hash=sender.model_hash,
        dtype=sender.dtype,
        num_layers=1,
        num_kv_heads=sender.num_kv_heads,
        head_dim=sender.head_dim,
        page_tokens=page_tokens,
        head_start=heads[0],
        head_count=heads[1],
        num_pages=num_tokens // page_tokens,
    )
    return Side(layout, np.arange(layout.num_pages, dtype=np.int64), start_token)


def layer_token_bytes(sender: KvLayout, receiver: KvLayout) -> int:
    """Bytes that one token of one layer sends: K and V of the common heads."""
    heads = shared_heads(sender, receiver)
    return 0 if heads is None else 2 * heads[1] * sender.row_bytes


def _cuts(sender: Side, receiver: Side, start: int, count: int) -> Offsets:
    """First tokens of the pieces that lie in one page on both sides. int64 [pieces]."""
    cuts = [np.array([start], dtype=np.int64)]
    for side in (sender, receiver):
        step = side.layout.page_tokens
        first = start + step - (start - side.first_token) % step
        cuts.append(np.arange(first, start + count, step, dtype=np.int64))
    return np.unique(np.concatenate(cuts))


def _addresses(side: Side, tokens: Offsets, head: int, heads: int) -> Offsets:
    """Byte offsets [pieces, 2, heads] of the pieces that begin with `tokens`, in memory order."""
    layout = side.layout
    page, row = side.rows(tokens)
    head_bytes = layout.page_tokens * layout.row_bytes
    first = head - layout.head_start
    part, inside = np.divmod(np.arange(first, first + heads, dtype=np.int64), layout.part_heads)
    planes = np.arange(2, dtype=np.int64)[:, None] * layout.part_heads
    inner = part[None, :] * layout.part_bytes + (planes + inside[None, :]) * head_bytes
    return (page + row * layout.row_bytes)[:, None, None] + inner[None, :, :]
