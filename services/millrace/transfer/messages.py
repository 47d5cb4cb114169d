"""The notifications of a KV transfer: a compact header, then the request's id in UTF-8."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from millrace.core.errors import TransferError

#: First byte of a notification, by which a transport tells its subscribers apart.
TO_RECEIVER = 1
TO_SENDER = 2

# channel u8, kind u8, layer u16, lease u32, chunk u32, slot u32, start u32, tokens u32,
# generation u64, bytes u64
_HEADER = struct.Struct("<BBHIIIIIQQ")


class Kind(IntEnum):
    """What a notification says."""

    WRITTEN = 1  # to the receiver: a part's bytes lie there
    ALIVE = 2  # to the receiver: the sender still holds the lease
    DRAINED = 3  # to the receiver: no write of the lease is in flight, and none will follow
    SLOT_FREE = 4  # to the sender: a staging slot may be written again
    RENEW = 5  # to the sender: the lease goes on
    DROP = 6  # to the sender: the KV is not needed any more; drain and say DRAINED
    STOP = 7  # to the sender: the transfer failed; drain and say DRAINED

    @property
    def channel(self) -> int:
        return TO_RECEIVER if self <= Kind.DRAINED else TO_SENDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification. `generation` is the receiver's. A part is a token range of a layer;
    `slot` is where it was staged."""

    kind: Kind
    request_id: str
    lease: int
    generation: int
    chunk: int = 0
    layer: int = 0
    slot: int = 0
    start_token: int = 0
    num_tokens: int = 0
    nbytes: int = 0

    def encode(self) -> bytes:
        return (
            _HEADER.pack(
                self.kind.channel,
                self.kind,
                self.layer,
                self.lease,
                self.chunk,
                self.slot,
                self.start_token,
                self.num_tokens,
                self.generation,
                self.nbytes,
            )
            + self.request_id.encode()
        )

    @staticmethod
    def decode(payload: bytes) -> Message:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            channel, kind, layer, lease, chunk, slot, start, tokens, generation, nbytes = (
                _HEADER.unpack_from(payload)
            )
            if Kind(kind).channel != channel:
                raise ValueError(f"kind {kind} on channel {channel}")
            return Message(
                kind=Kind(kind),
                request_id=payload[_HEADER.size :].decode(),
                lease=lease,
                generation=generation,
                chunk=chunk,
                layer=layer,
                slot=slot,
                start_token=start,
                num_tokens=tokens,
                nbytes=nbytes,
            )
        except (struct.error, ValueError) as error:
            raise TransferError(f"not a KV notification: {error}") from error
