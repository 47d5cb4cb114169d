"""The notifications of a KV transfer: a compact header, then the request's id in UTF-8."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from millrace.core.errors import TransferError

#: First byte of a notification, by which a transport finds its subscriber.
TO_RECEIVER = 1
TO_SENDER = 2

# channel u8, kind u8, parts u16, lease u32, slot u32, generation u64; then the parts, each of
# chunk u32, layer u16, start u32, tokens u32, bytes u64, crc32c u32; then the request's id
_HEADER = struct.Struct("<BBHIIQ")
_PART = struct.Struct("<IHIIQI")
#: A notification of this many parts has less than 4 KiB.
MAX_PARTS = 128


class Kind(IntEnum):
    """The kinds of notifications between a sender and a receiver."""

    WRITTEN = 1  # to the receiver: the bytes of some parts lie there
    ALIVE = 2  # to the receiver: the sender still holds the lease
    DONE = 3  # to the receiver: the sender has written everything; nothing will follow
    DRAINED = 4  # to the receiver: given up; no write of the lease is in flight, none will follow
    SLOT_FREE = 5  # to the sender: a staging slot may be written again
    RENEW = 6  # to the sender: the lease is renewed
    DROP = 7  # to the sender: the KV is not needed any more; drain and send DRAINED
    STOP = 8  # to the sender: the transfer failed; drain and send DRAINED

    @property
    def channel(self) -> int:
        return TO_RECEIVER if self <= Kind.DRAINED else TO_SENDER


class WrittenRange(NamedTuple):
    """A token range of a layer of a chunk, and the number of its bytes that were written.

    `checksum` is the crc32c of the bytes if the receiver asked for checksums, else 0.
    """

    chunk: int
    layer: int
    start_token: int
    num_tokens: int
    nbytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification. `generation` is the receiver's.

    A write carries `parts`; in a staging `slot` they lie in this order.
    """

    kind: Kind
    request_id: str
    lease: int
    generation: int
    slot: int = 0
    parts: tuple[WrittenRange, ...] = ()

    def encode(self) -> bytes:
        header = _HEADER.pack(
            self.kind.channel, self.kind, len(self.parts), self.lease, self.slot, self.generation
        )
        parts = (_PART.pack(*part) for part in self.parts)
        return b"".join((header, *parts, self.request_id.encode()))

    @staticmethod
    def decode(payload: bytes) -> Message:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            channel, kind, count, lease, slot, generation = _HEADER.unpack_from(payload)
            if Kind(kind).channel != channel:
                raise ValueError(f"kind {kind} on channel {channel}")
            end = _HEADER.size + count * _PART.size
            if len(payload) < end:
                raise ValueError(f"{len(payload)} bytes can't hold {count} parts")
            return Message(
                kind=Kind(kind),
                request_id=payload[end:].decode(),
                lease=lease,
                generation=generation,
                slot=slot,
                parts=tuple(
                    map(WrittenRange._make, _PART.iter_unpack(payload[_HEADER.size : end]))
                ),
            )
        except (struct.error, ValueError) as error:
            raise TransferError(f"not a KV notification: {error}") from error
