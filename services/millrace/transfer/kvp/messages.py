"""The notifications between the KV owner of a long request and a KVP worker: a fixed header."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from millrace.core.errors import TransferError

#: First byte of a notification, by which a transport finds its subscriber.
TO_WORKER = 5
TO_OWNER = 6

# channel u8, kind u8, layer u16, slot u32, pass u64, piece u32, rows u32, new rows u32, entries u32
_HEADER = struct.Struct("<BBHIQIIII")


class KvpKind(IntEnum):
    """The kinds of a pair's notifications."""

    LAYER = 1  # to the KVP worker: q and new K/V of a piece; with entries, also its row table
    BYE = 2  # to the KVP worker: no write of mine is in flight, none will follow; send GONE
    PARTIAL = 3  # to the KV owner: a piece's partial results
    FAILED = 4  # to the KV owner: no partial results; the reason follows the header
    GONE = 5  # to the KV owner: no write of mine is in flight, and none will follow

    @property
    def channel(self) -> int:
        return TO_WORKER if self <= KvpKind.BYE else TO_OWNER


class KvpMessage(NamedTuple):
    """One notification of a pair.

    `slot` is the pair's number at the KVP worker, `number` is the pass's number at the KV owner. In
    PARTIAL, `entries` counts the table's entries that have lost their shard.

    `body` of LAYER: row table, q and K/V, or nothing where these were written. `body` of PARTIAL:
    u32 per entry whose shard is gone, then the results, unless they were written. `body` of FAILED:
    the reason.
    """

    kind: KvpKind
    slot: int
    number: int = 0
    piece: int = 0
    layer: int = 0
    rows: int = 0
    new_rows: int = 0
    entries: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        header = _HEADER.pack(
            self.kind.channel,
            self.kind,
            self.layer,
            self.slot,
            self.number,
            self.piece,
            self.rows,
            self.new_rows,
            self.entries,
        )
        return header + self.body

    @staticmethod
    def decode(payload: bytes) -> KvpMessage:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            if len(payload) < _HEADER.size:
                raise ValueError(f"{len(payload)} bytes are too few")
            channel, kind, layer, slot, number, piece, rows, new_rows, entries = (
                _HEADER.unpack_from(payload)
            )
            body = payload[_HEADER.size :]
            message = KvpMessage(
                KvpKind(kind), slot, number, piece, layer, rows, new_rows, entries, body
            )
            if message.kind.channel != channel:
                raise ValueError(f"kind {kind} on channel {channel}")
            if message.kind is KvpKind.PARTIAL and len(body) < 4 * entries:
                raise ValueError(f"{entries} entries in {len(body)} bytes")
            return message
        except ValueError as error:
            raise TransferError(f"not a notification of an exchange: {error}") from error

    def missing(self) -> tuple[int, ...]:
        """Returns the entries of the piece's table whose shard is gone. For a PARTIAL."""
        return struct.unpack_from(f"<{self.entries}I", self.body)

    @property
    def results(self) -> bytes:
        """Returns the results in the body of a PARTIAL; empty where they were written."""
        return self.body[4 * self.entries :]


def missing_body(entries: Sequence[int]) -> bytes:
    """Packs the entries that `KvpMessage.missing` returns."""
    return struct.pack(f"<{len(entries)}I", *entries)
