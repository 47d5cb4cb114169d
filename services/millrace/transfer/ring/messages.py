"""The notifications inside an SP group: a fixed header, then the request's id."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from millrace.core.errors import TransferError

#: First byte of a notification, by which a transport finds its subscriber.
RING_CHANNEL = 3

#: The chunk number in messages about decode's history, which comes before the first chunk.
KEPT = 2**32 - 1

# channel u8, kind u8, attempt u32, chunk u32, number u64
_HEADER = struct.Struct("<BBIIQ")


class RingKind(IntEnum):
    """The kinds of notifications between members. `number` is 0 where it has no meaning."""

    BLOCK = 1  # to the next member: block `number` lies in its buffer
    CREDIT = 2  # to the previous member: `number` blocks have left the buffers; 0 opens them
    WANT = 3  # to a giver that sent OFFER: the pages for this chunk's moves may be written
    LAYER = 4  # to a receiver: layer `number` of the given history lies in its pages
    RENEW = 5  # to a receiver: may I still write?
    ALIVE = 6  # the answer to it: yes
    ABORT = 7  # to all: write nothing more here, and send DRAINED
    DRAINED = 8  # no write of mine to you is in flight, and none will follow
    OFFER = 9  # to a receiver: I am linked to you, and give you history for this chunk
    UNREAD = 10  # to a sender: a message of yours could not be read; it names no request


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMessage:
    """One notification about an attempt at a request."""

    kind: RingKind
    request_id: str
    attempt: int
    chunk: int = 0
    number: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    def encode(self) -> bytes:
        fields = (RING_CHANNEL, self.kind, self.attempt, self.chunk, self.number)
        return _HEADER.pack(*fields) + self.request_id.encode()

    @staticmethod
    def decode(payload: bytes) -> RingMessage:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            if len(payload) < _HEADER.size:
                raise ValueError(f"{len(payload)} bytes are too few")
            channel, kind, attempt, chunk, number = _HEADER.unpack_from(payload)
            if channel != RING_CHANNEL:
                raise ValueError(f"channel {channel}")
            return RingMessage(
                kind=RingKind(kind),
                request_id=payload[_HEADER.size :].decode(),
                attempt=attempt,
                chunk=chunk,
                number=number,
            )
        except ValueError as error:
            raise TransferError(f"not a notification of a ring: {error}") from error
