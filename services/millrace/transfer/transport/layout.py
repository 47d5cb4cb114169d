"""Maps a token range's K and V from the sender's memory to the receiver's memory.

The two ends may differ in page size, page order, heads and layers. A piece ends where a page of
either end ends; neighbouring pieces are joined afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.core.arithmetic import ceil_div
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run
from millrace.transfer.transport.runs import Offsets, Runs


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One end of a transfer: a pool, a request's pages in it, and the tokens in the pages' slots.

    A page has `page_tokens` slots, counted on from page to page. Tokens lie in runs: run i has the
    tokens ``[starts[i], ends[i])``, from slot ``slots[i]`` on. All three are int64 [runs] and
    ascending.
    """

    layout: KvLayout
    pages: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]

    @staticmethod
    def of(layout: KvLayout, pages: Sequence[int], num_tokens: int, start_token: int = 0) -> Side:
        """Makes a side of neighbouring tokens in order from the first slot on: a prompt, or a
        shard.

        Raises ValueError when the pages don't hold the tokens or aren't the pool's.
        """
        array = _pool_pages(layout, pages)
        if len(array) < layout.pages_for(num_tokens):
            raise ValueError(
                f"{len(array)} pages of {layout.page_tokens} tokens can't hold {num_tokens} tokens"
            )
        return Side(layout, array, *_one_run(start_token, num_tokens))

    @staticmethod
    def of_runs(layout: KvLayout, pages: Sequence[int], runs: Sequence[Run]) -> Side:
        """Makes a side of some tokens of a prompt: a member's share of it (Tetris section 4.1).

        Raises ValueError when a run is empty or leaves the pages, when two runs share a token or a
        slot, or the pages aren't the pool's.
        """
        array = _pool_pages(layout, pages)
        table = np.array(
            sorted((run.start_token, run.num_tokens, run.slot) for run in runs), dtype=np.int64
        ).reshape(-1, 3)
        starts, counts, slots = table.T
        for name, begins in (("token", starts), ("slot", np.sort(slots))):
            lengths = counts if name == "token" else counts[np.argsort(slots)]
            if (begins < 0).any() or (begins[:-1] + lengths[:-1] > begins[1:]).any():
                raise ValueError(f"two runs have a {name} in common, or one begins before 0")
        if (counts < 1).any() or (slots + counts > len(array) * layout.page_tokens).any():
            raise ValueError(
                f"a run is empty, or leaves the {len(array)} pages of {layout.page_tokens} tokens"
            )
        return Side(layout, array, starts, starts + counts, slots)

    def has_any(self, start: int, end: int) -> bool:
        """Returns whether a token of ``[start, end)`` lies here."""
        return bool(((self.starts < end) & (start < self.ends)).any())

    def rows(self, tokens: Offsets) -> tuple[Offsets, Offsets]:
        """Returns (byte offset of each token's page, the token's row in it), both int64 [tokens].

        Raises ValueError for a token that does not lie here.
        """
        run = np.searchsorted(self.starts, tokens, side="right") - 1
        known = (run >= 0) & (tokens < self.ends[run] if len(self.ends) else False)
        if not known.all():
            raise ValueError(f"token {tokens[np.argmin(known)]} does not lie in these pages")
        slot = self.slots[run] + tokens - self.starts[run]
        index, row = np.divmod(slot, self.layout.page_tokens)
        return self.pages[index] * self.layout.page_bytes, row

    def cuts(self, start: int, end: int) -> list[Offsets]:
        """Returns the tokens within ``[start, end)`` at which a page or a run begins, or a run
        ends.
        """
        first, last = (
            np.searchsorted(self.ends, start, side="right"),
            np.searchsorted(self.starts, end),
        )
        found = [self.starts[first:last], self.ends[first:last]]
        step = self.layout.page_tokens
        for i in range(first, last):
            page_begins = self.starts[i] + -self.slots[i] % step
            skipped = max(0, ceil_div(start - page_begins, step))
            until = min(end, self.ends[i])
            found.append(np.arange(page_begins + skipped * step, until, step, dtype=np.int64))
        return [cuts[(cuts > start) & (cuts < end)] for cuts in found]


def mismatch(sender: KvLayout, receiver: KvLayout) -> str:
    """Returns why KV of `sender` does not fit `receiver`, with both values; empty when it fits."""
    for name in ("model_hash", "dtype", "model_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(receiver, name), getattr(sender, name)
        if ours != theirs:
            return f"{name} differs: the sender has {theirs!r}, the receiver {ours!r}"
    if shared_heads(sender, receiver) is None:
        return (
            f"no common heads: the sender has {sender.head_start}..{sender.head_end - 1}, the "
            f"receiver {receiver.head_start}..{receiver.head_end - 1}"
        )
    if not shared_layers(sender.layers, receiver.layers):
        return (
            f"no common layers: the sender has {sender.layer_start}..{sender.layer_end - 1}, the "
            f"receiver {receiver.layer_start}..{receiver.layer_end - 1}"
        )
    return ""


def shared_layers(one: range, other: range) -> range:
    """Returns the layers that are in both; empty when there are none."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def shared_heads(one: KvLayout, other: KvLayout) -> tuple[int, int] | None:
    """Returns (first, count) of the heads that both hold, or None."""
    first = max(one.head_start, other.head_start)
    count = min(one.head_end, other.head_end) - first
    return (first, count) if count > 0 else None


def layer_runs(sender: Side, receiver: Side, start_token: int, num_tokens: int) -> Runs:
    """Returns runs that carry tokens ``[start_token, start_token + num_tokens)`` of one layer.

    The runs go from the sender's first layer to the receiver's first layer; `at_layer` shifts them
    to a layer that both have. They cover the heads that both hold, and are coalesced. A head goes
    to every rank of the receiver that holds it. Where ranks of the sender hold the same head, they
    take turns. Offsets are in bytes from rank 0's pool. No loop over tokens: 1M tokens take tens of
    milliseconds.
    """
    heads = shared_heads(sender.layout, receiver.layout)
    if heads is None or num_tokens == 0:
        return Runs(*(np.empty(0, dtype=np.int64),) * 3)
    end_token = start_token + num_tokens
    cuts = [side.cuts(start_token, end_token) for side in (sender, receiver)]
    starts = np.unique(np.concatenate(([start_token], *cuts[0], *cuts[1])))
    lengths = np.diff(starts, append=end_token)
    source, target = (
        _addresses(side, starts, heads[0], heads[1]).reshape(-1) for side in (sender, receiver)
    )
    row_bytes = sender.layout.row_bytes
    runs = Runs(source, target, np.repeat(lengths * row_bytes, 2 * heads[1])).coalesced()
    copies = range(receiver.layout.copies)
    if len(copies) == 1:
        return runs
    return runs.repeated(
        [copy % sender.layout.copies * sender.layout.part_bytes for copy in copies],
        [copy * receiver.layout.part_bytes for copy in copies],
    )


def at_layer(runs: Runs, sender: KvLayout, receiver: KvLayout, layer: int) -> Runs:
    """Returns the runs of the model's `layer`, given the runs of `layer_runs`."""
    return runs.shifted(sender.layer_offset(layer), receiver.layer_offset(layer))


def packed(sender: KvLayout, receiver: Side, start_token: int, num_tokens: int) -> Side:
    """Returns a packed side of a staging slot: only this token range of one layer, without gaps.

    Whole pages of the receiver, with neighbouring tokens in order, have the pool's layout, so that
    they move in one piece; any other range is a single page of its own size.
    """
    page = receiver.layout.page_tokens
    whole = (start_token - int(receiver.starts[0])) % page == num_tokens % page == 0
    if whole:
        return _side_of_pages(sender, receiver.layout, page, start_token, num_tokens)
    return one_page(sender, receiver.layout, start_token, num_tokens)


def one_page(one: KvLayout, other: KvLayout, start_token: int, num_tokens: int) -> Side:
    """Returns a side that has a token range of one layer in a single page: the heads that both
    layouts hold, without gaps.
    """
    return _side_of_pages(one, other, num_tokens, start_token, num_tokens)


def _side_of_pages(
    one: KvLayout, other: KvLayout, page_tokens: int, start_token: int, num_tokens: int
) -> Side:
    heads = shared_heads(one, other)
    if heads is None:
        raise ValueError(mismatch(one, other))
    layout = KvLayout(
        model_hash=one.model_hash,
        dtype=one.dtype,
        num_layers=1,
        num_kv_heads=one.num_kv_heads,
        head_dim=one.head_dim,
        page_tokens=page_tokens,
        head_start=heads[0],
        head_count=heads[1],
        num_pages=num_tokens // page_tokens,
    )
    pages = np.arange(layout.num_pages, dtype=np.int64)
    return Side(layout, pages, *_one_run(start_token, num_tokens))


def layer_token_bytes(sender: KvLayout, receiver: KvLayout) -> int:
    """Returns the bytes that one token of one layer sends: K and V of the common heads."""
    heads = shared_heads(sender, receiver)
    return 0 if heads is None else 2 * heads[1] * sender.row_bytes


def _pool_pages(layout: KvLayout, pages: Sequence[int]) -> npt.NDArray[np.int64]:
    array = np.asarray(pages, dtype=np.int64)
    if len(array) and (array.min() < 0 or array.max() >= layout.num_pages):
        raise ValueError(f"a page lies outside the pool of {layout.num_pages} pages")
    return array


def _one_run(start_token: int, num_tokens: int) -> tuple[Offsets, Offsets, Offsets]:
    """Returns (starts, ends, slots) of tokens that lie in order from slot 0 on."""
    return (
        np.array([start_token], dtype=np.int64),
        np.array([start_token + num_tokens], dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


def _addresses(side: Side, tokens: Offsets, head: int, heads: int) -> Offsets:
    """Returns byte offsets [pieces, 2, heads] of the pieces that begin with `tokens`, in memory
    order, at the first rank that holds each head.
    """
    layout = side.layout
    page, row = side.rows(tokens)
    head_bytes = layout.page_tokens * layout.row_bytes
    first = head - layout.head_start
    part, inside = np.divmod(np.arange(first, first + heads, dtype=np.int64), layout.part_heads)
    planes = np.arange(2, dtype=np.int64)[:, None] * layout.part_heads
    rank = part[None, :] * layout.copies
    inner = rank * layout.part_bytes + (planes + inside[None, :]) * head_bytes
    return (page + row * layout.row_bytes)[:, None, None] + inner[None, :, :]
