"""Attention over K/V of which a part is at other instances (KVP: Mnemosyne 4.4, Medha 3.3).

A long request's home holds the K/V of its first tokens, holders that of the others. In every layer
the home sends the queries, and K/V of tokens that are a holder's, attends over its own part
meanwhile, and merges the holders' partial results by their log-sum-exps. Who moves all that is a
`RemoteLink`.

Shape letters: n rows of the pass, r rows of a partial, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from millrace.core.kvp_rows import RemoteRows, RemoteShard, remote_rows

__all__ = ["Partial", "Remote", "RemoteLink", "RemotePass", "RemoteRows", "RemoteShard"]


class Partial(NamedTuple):
    """Partial results of some rows of a pass. They hold until the next layer's `send`."""

    rows: Tensor | slice  # which: int64 [r], ascending, or neighbours
    out: Tensor  # float32 [r, h, d]
    lse: Tensor  # float32 [r, h], natural logarithm


class RemoteLink(Protocol):
    """The way to the holders, of one pass at a time. For the compute thread.

    Of each pass `begin`; of each layer `send`, then `partials` to its end; then `end`. A pass may
    be given up at any point: the next `begin` makes sure that nothing of it is on its way.
    """

    def begin(self, rows: Sequence[RemoteRows], slots: Tensor) -> None:
        """slots: int64 [n], on the host, page * page_tokens + offset of each row's K/V."""
        ...

    def send(self, layer: int, q_nhd: Tensor, kv_layer: Tensor) -> None:
        """Sends the q of the pass's remote rows, and the K/V of new ones, which lies at their slots
        in kv_layer [pages, 2, k, page_tokens, d]. All may change after the call."""
        ...

    def partials(self, layer: int) -> Iterator[Partial]:
        """Partial results of a layer as they come; a row may be in several. What a lost holder had
        to give is missing."""
        ...

    def end(self) -> Mapping[RemoteRows, str]:
        """Of those that `begin` got the ones whose shard was lost, and why: their rows are wrong
        from some layer on."""
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """What a home needs for passes with remote rows.

    spill_pages: pages of the home's pool where the K/V of holders' tokens lies until it is sent,
    at least as many slots as a pass has tokens past the home's own shards. The caller's to take
    and to free; they may change between passes.
    """

    link: RemoteLink
    spill_pages: Sequence[int]


@dataclass(slots=True, eq=False)
class RemotePass:
    """The remote rows of one pass; filled by whoever makes it up, read by the runner.

    `lost`: afterwards, each row that a lost shard has made wrong, and why.
    """

    remote: Remote
    rows: list[RemoteRows] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)

    def add(
        self, shards: Sequence[RemoteShard], first_row: int, first_position: int, num_rows: int = 1
    ) -> None:
        """Rows of a request with these shards, whose home holds what is before the first."""
        self.rows += remote_rows(
            shards, first_row=first_row, first_position=first_position, num_rows=num_rows
        )
