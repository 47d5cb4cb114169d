"""What travels between a long request's home and the holders of its other shards (Medha 3.3).

In every layer the home sends a holder the queries of its rows, and K/V of the tokens that the
holder keeps; it gets the holder's partial outputs back, with their log-sum-exps. A pass's row
table says once, with the first layer, which rows these are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError, TransferError

# shard u64, first position u32, rows u32, new rows u32
_ENTRY: Final = struct.Struct("<QIII4x")

_ALIGN_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard:
    """Token positions [start_token, end_token) of a request, at a holder that is not its home.

    `shard` is the number that the holder gave it when it was opened.
    """

    holder: str
    shard: int
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRows:
    """Rows of a pass that one shard's holder attends for: neighbours in the pass and in position.

    Of these the first `new_rows` are tokens of the shard itself: their K/V goes along, to be kept.
    """

    holder: str
    shard: int
    first_row: int
    num_rows: int
    first_position: int
    new_rows: int = 0

    def cut(self, rows: int) -> tuple[RemoteRows, RemoteRows]:
        """The first `rows` rows, and the others."""
        kept = min(self.new_rows, rows)
        return (
            replace(self, num_rows=rows, new_rows=kept),
            replace(
                self,
                first_row=self.first_row + rows,
                num_rows=self.num_rows - rows,
                first_position=self.first_position + rows,
                new_rows=self.new_rows - kept,
            ),
        )


def remote_rows(
    shards: Iterable[RemoteShard],
    *,
    first_row: int,
    first_position: int,
    num_rows: int,
    reach: int | None = None,
) -> list[RemoteRows]:
    """What the holders do for rows at positions [first_position, first_position + num_rows).

    A row before a shard sees nothing of it. `reach`: the widest sliding window, where every layer
    has one; a row that has left a shard behind by that much sees nothing of it either.
    """
    end = first_position + num_rows
    found = []
    for shard in shards:
        first = max(first_position, shard.start_token)
        last = end if reach is None else min(end, shard.end_token + reach - 1)
        if first < last:
            found.append(
                RemoteRows(
                    holder=shard.holder,
                    shard=shard.shard,
                    first_row=first_row + first - first_position,
                    num_rows=last - first,
                    first_position=first,
                    new_rows=max(0, min(last, shard.end_token) - first),
                )
            )
    return found


def pieces_of(rows: Iterable[RemoteRows], max_rows: int) -> list[list[RemoteRows]]:
    """One holder's rows in pieces of at most `max_rows`, in order; no row is twice in one."""
    pieces: list[list[RemoteRows]] = []
    room = end = 0
    for entry in rows:
        rest = entry
        while rest.num_rows:
            if not room or rest.first_row < end:
                pieces.append([])
                room = max_rows
            now, rest = rest.cut(min(room, rest.num_rows))
            pieces[-1].append(now)
            room -= now.num_rows
            end = now.first_row + now.num_rows
    return pieces


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A `RemoteRows` as its holder knows it: its rows follow those of the entries before it."""

    shard: int
    first_position: int
    num_rows: int
    new_rows: int


def pack_table(rows: Sequence[RemoteRows]) -> bytes:
    """The row table of a piece, `ExchangeShape.entry_bytes` an entry."""
    return b"".join(
        _ENTRY.pack(entry.shard, entry.first_position, entry.num_rows, entry.new_rows)
        for entry in rows
    )


def unpack_table(table: bytes | memoryview, max_rows: int) -> list[TableEntry]:
    """Raises TransferError for bytes that are no table of at most so many rows."""
    if len(table) % _ENTRY.size:
        raise TransferError(f"{len(table)} bytes are no row table")
    entries = [TableEntry(*fields) for fields in _ENTRY.iter_unpack(table)]
    if any(entry.num_rows < 1 or entry.new_rows > entry.num_rows for entry in entries):
        raise TransferError("an entry of a row table has no rows, or more new ones than rows")
    if (rows := sum(entry.num_rows for entry in entries)) > max_rows:
        raise TransferError(f"a row table has {rows} rows; the exchange has room for {max_rows}")
    return entries


class Request(NamedTuple):
    """One layer of a piece of a pass, to its holder. With `entries` its row table goes along."""

    piece: int
    layer: int
    rows: int
    new_rows: int
    entries: int = 0


class Reply(NamedTuple):
    """A holder's answer: its partial results lie there. `missing`: entries of the piece whose shard
    is gone at the holder; `lost`: why there is no answer, nor will be."""

    holder: str
    missing: tuple[int, ...] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """The memory of one owner and one holder, at either side, for pieces of `max_rows` rows.

    At the holder: the row table, from `queries_at` on the q rows [n, h, d], right behind them K/V
    rows [m, 2, k, d], of the model's dtype. At the owner: partial outputs [n, h, d], right behind
    them their log-sum-exps [n, h], float32. All heads of the model.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    max_rows: int

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field, its value and what it must be."""
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "element_bytes", "max_rows"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"exchange.{name} is {value!r}; it must be at least 1")

    @property
    def entry_bytes(self) -> int:
        return _ENTRY.size

    @property
    def queries_at(self) -> int:
        """Where the q rows begin."""
        return _aligned(self.max_rows * self.entry_bytes)

    @property
    def request_bytes(self) -> int:
        """Bytes of a piece at the holder, at most."""
        return _aligned(self.queries_at + self.sent_bytes(self.max_rows, self.max_rows))

    @property
    def reply_bytes(self) -> int:
        """Bytes of a piece's partial results at the owner, at most."""
        return _aligned(self.returned_bytes(self.max_rows))

    def sent_bytes(self, rows: int, new_rows: int) -> int:
        """Bytes of a layer's q and K/V of a piece."""
        q = rows * self.num_q_heads * self.head_dim
        kv = new_rows * 2 * self.num_kv_heads * self.head_dim
        return (q + kv) * self.element_bytes

    def returned_bytes(self, rows: int) -> int:
        """Bytes of a layer's partial results of a piece."""
        return rows * self.num_q_heads * (self.head_dim + 1) * 4


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, _ALIGN_BYTES) * _ALIGN_BYTES
