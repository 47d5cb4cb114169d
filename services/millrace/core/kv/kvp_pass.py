"""The messages of a pass between a KV owner and its KVP workers (Medha 3.3).

In every layer the KV owner sends a worker the queries of its rows, and K/V of the tokens that the
worker keeps. The worker returns partial outputs with their log-sum-exps. The row table of a pass,
sent once with the first layer, says which rows these are.
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
    """Token positions [start_token, end_token) of a request, at a KVP worker.

    `shard` is the number that the worker gave it when it was opened.
    """

    worker: str
    shard: int
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRows:
    """Rows of a pass that the worker of one shard attends for: neighbours in the pass and in
    position.

    The first `new_rows` of them are tokens of the shard itself: their K/V is sent with them, to be
    kept.
    """

    worker: str
    shard: int
    first_row: int
    num_rows: int
    first_position: int
    new_rows: int = 0

    def cut(self, rows: int) -> tuple[RemoteRows, RemoteRows]:
        """Returns the first `rows` rows, and the others."""
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
    """Returns the workers' share of rows at positions [first_position, first_position + num_rows).

    A row before a shard sees no token of it. `reach`: the widest sliding window, where every layer
    has a window; a row `reach` or more tokens after a shard's last token sees none of it either.
    """
    end = first_position + num_rows
    found = []
    for shard in shards:
        first = max(first_position, shard.start_token)
        last = end if reach is None else min(end, shard.end_token + reach - 1)
        if first < last:
            found.append(
                RemoteRows(
                    worker=shard.worker,
                    shard=shard.shard,
                    first_row=first_row + first - first_position,
                    num_rows=last - first,
                    first_position=first,
                    new_rows=max(0, min(last, shard.end_token) - first),
                )
            )
    return found


def pieces_of(rows: Iterable[RemoteRows], max_rows: int) -> list[list[RemoteRows]]:
    """Cuts one worker's rows into pieces of at most `max_rows`, in order; no row is twice in one
    piece.
    """
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
    """A `RemoteRows` as its worker knows it: its rows follow those of the entries before it."""

    shard: int
    first_position: int
    num_rows: int
    new_rows: int


def pack_table(rows: Sequence[RemoteRows]) -> bytes:
    """Writes the row table of a piece, `ExchangeShape.entry_bytes` per entry."""
    return b"".join(
        _ENTRY.pack(entry.shard, entry.first_position, entry.num_rows, entry.new_rows)
        for entry in rows
    )


def unpack_table(table: bytes | memoryview, max_rows: int) -> list[TableEntry]:
    """Reads a row table.

    Raises TransferError for bytes that are no table of at most `max_rows` rows.
    """
    if len(table) % _ENTRY.size:
        raise TransferError(f"{len(table)} bytes are no row table")
    entries = [TableEntry(*fields) for fields in _ENTRY.iter_unpack(table)]
    if any(entry.num_rows < 1 or entry.new_rows > entry.num_rows for entry in entries):
        raise TransferError("an entry of a row table has no rows, or more new ones than rows")
    if (rows := sum(entry.num_rows for entry in entries)) > max_rows:
        raise TransferError(f"a row table has {rows} rows; the exchange has room for {max_rows}")
    return entries


class Request(NamedTuple):
    """One layer of a piece of a pass, to its KVP worker.

    With `entries` it carries the row table.
    """

    piece: int
    layer: int
    rows: int
    new_rows: int
    entries: int = 0


class Reply(NamedTuple):
    """The answer of a KVP worker: its partial results lie in the reply memory.

    `missing`: entries of the piece whose shard is gone at the worker. `lost`: why there is no
    answer, and will be none."""

    worker: str
    missing: tuple[int, ...] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """The memory of one KV owner and one KVP worker, at either side, for pieces of `max_rows` rows.

    At the worker: the row table, from `queries_at` on the q rows [n, h, d], directly followed by
    K/V rows [m, 2, k, d], of the model's dtype. At the owner: partial outputs [n, h, d], directly
    followed by their log-sum-exps [n, h], float32. All heads of the model.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    max_rows: int

    def __post_init__(self) -> None:
        """Raises ConfigError that names the field, its value and its range."""
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "element_bytes", "max_rows"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"exchange.{name} is {value!r}; it must be at least 1")

    @property
    def entry_bytes(self) -> int:
        return _ENTRY.size

    @property
    def queries_at(self) -> int:
        """Returns the offset of the q rows, in bytes."""
        return _aligned(self.max_rows * self.entry_bytes)

    @property
    def request_bytes(self) -> int:
        """Returns the bytes of a piece at the worker, at most."""
        return _aligned(self.queries_at + self.sent_bytes(self.max_rows, self.max_rows))

    @property
    def reply_bytes(self) -> int:
        """Returns the bytes of a piece's partial results at the owner, at most."""
        return _aligned(self.returned_bytes(self.max_rows))

    def sent_bytes(self, rows: int, new_rows: int) -> int:
        """Returns the bytes of a layer's q and K/V of a piece."""
        q = rows * self.num_q_heads * self.head_dim
        kv = new_rows * 2 * self.num_kv_heads * self.head_dim
        return (q + kv) * self.element_bytes

    def returned_bytes(self, rows: int) -> int:
        """Returns the bytes of a layer's partial results of a piece."""
        return rows * self.num_q_heads * (self.head_dim + 1) * 4


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, _ALIGN_BYTES) * _ALIGN_BYTES
