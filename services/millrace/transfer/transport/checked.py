"""A transport whose messages and writes carry crc32c sums (`transfer.kv_checksum`).

A message is sealed: it carries its own sum, the sum of the bytes that were written before it, and
the places where they lie at the peer. The peer sums them there, and hands the message over if both
sums agree. Else the handlers get a payload of their channel's byte alone, which is no message: all
that exchange data with that peer give it up, as after any message that can't be read. A channel may
have sums of its own for what it writes; its messages are sealed all the same.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Final

import crc32c
import numpy as np

from millrace.transfer.transport.base import Handler, Transport, hand_over
from millrace.transfer.transport.over import TransportOver
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Runs
from millrace.transfer.transport.sums import crc_of

log = logging.getLogger(__name__)

#: First byte of a sealed message.
SEALED_CHANNEL: Final = 10

# channel u8, sum of all that follows u32, sum of the written bytes u32, region u32, runs u32
_HEADER = struct.Struct("<BIIII")
_SUMMED_FROM = 5  # of the header: the sum's own bytes and the channel are left out
_MOST_BYTES = 2**48  # of a region
_NOTHING = Runs(*(np.empty(0, dtype=np.int64) for _ in range(3)))


class CheckedTransport(TransportOver):
    """A `Transport` over another one, whose peers are `CheckedTransport`s, too.

    A write is summed on the thread that calls `write`, and checked on the transport's thread.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        checks: bool,
        summed: Collection[int] = (),
        on_corrupt: Callable[[str], object] = lambda peer: None,
    ) -> None:
        """`checks`: sums what it sends, and checks what comes with sums; else it sends without
        sums, and takes what comes. `summed`: channels with sums of their own for what they write.
        `on_corrupt` gets the peer of every message that was not as it was sent, on the transport's
        thread.
        """
        super().__init__(inner)
        self._checks = checks
        self._summed = summed
        self._on_corrupt = on_corrupt
        self._regions: list[Memory] = []
        self._handlers: dict[int, Handler] = {}
        inner.subscribe(SEALED_CHANNEL, self._on_sealed)

    def register(self, memory: Memory) -> int:
        """Works as `Transport.register`. One that checks raises ValueError for a device's
        memory.
        """
        if self._checks and memory.device != HOST:
            raise ValueError("only memory on the host can be summed")
        self._regions.append(memory)
        return super().register(memory)

    def write(
        self,
        peer: str,
        runs: Runs,
        notification: bytes,
        *,
        region: int = 0,
        peer_region: int = 0,
        urgent: bool = False,
    ) -> Future[None]:
        """Works as `Transport.write`. A write without a notification is not checked."""
        if notification and self._checks:
            notification = self._summed_up(notification, runs, region, peer_region)
        return self.inner.write(
            peer, runs, notification, region=region, peer_region=peer_region, urgent=urgent
        )

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        sent = _sealed(payload) if self._checks else payload
        return self.inner.notify(peer, sent, urgent=urgent)

    def subscribe(self, channel: int, handler: Handler) -> None:
        self._handlers[channel] = handler
        super().subscribe(channel, handler)  # for peers that send without sums

    def _on_sealed(self, peer: str, sealed: bytes) -> None:
        try:
            payload, data_sum, region, places = _opened(sealed)
        except ValueError:
            self._corrupt(peer, "a message", self._handlers)
            return
        if self._checks and len(places) and self._sum(region, places) != data_sum:
            self._corrupt(peer, f"{places.total_bytes} bytes", payload[:1])
            return
        hand_over(self._handlers, peer, payload)

    def _summed_up(self, message: bytes, runs: Runs, region: int, peer_region: int) -> bytes:
        if message[0] in self._summed:
            return _sealed(message)
        data_sum = self._sum(region, runs)
        if data_sum is None:  # the write will be refused
            return _sealed(message)
        places = Runs(runs.target, runs.target, runs.length).coalesced()
        return _sealed(message, data_sum, peer_region, places)

    def _sum(self, region: int, places: Runs) -> int | None:
        """Returns the sum of bytes here; None where there are no such bytes."""
        if not 0 <= region < len(self._regions):
            return None
        try:
            return crc_of(self._regions[region], places)
        except ValueError:
            return None

    def _corrupt(self, peer: str, what: str, channels: Collection[int]) -> None:
        log.warning("%s from %s came with another checksum than was sent", what, peer)
        self._on_corrupt(peer)
        for channel in list(channels):
            hand_over(self._handlers, peer, bytes([channel]))


def _sealed(message: bytes, data_sum: int = 0, region: int = 0, places: Runs = _NOTHING) -> bytes:
    """Returns the message with its sums; the written bytes lie at `places` of the peer's region."""
    header = _HEADER.pack(SEALED_CHANNEL, 0, data_sum, region, len(places))
    rest = b"".join(
        (header[_SUMMED_FROM:], places.source.tobytes(), places.length.tobytes(), message)
    )
    return header[:1] + crc32c.crc32c(rest).to_bytes(4, "little") + rest


def _opened(sealed: bytes) -> tuple[bytes, int, int, Runs]:
    """Returns the message, the sum of its written bytes, their region here, and their places.

    Raises ValueError for bytes that were not sealed so.
    """
    try:
        _, total, data_sum, region, count = _HEADER.unpack_from(sealed)
    except struct.error as error:
        raise ValueError(str(error)) from None
    if crc32c.crc32c(memoryview(sealed)[_SUMMED_FROM:]) != total:
        raise ValueError("another sum")
    end = _HEADER.size + 16 * count
    table = np.frombuffer(sealed[_HEADER.size : end], dtype=np.int64).reshape(2, count)
    if (table > _MOST_BYTES).any():  # their sums would overflow
        raise ValueError("places beyond all memory")
    return sealed[end:], data_sum, region, Runs(table[0], table[0], table[1])
