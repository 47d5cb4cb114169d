"""The staging memory of a buffered receiver, and the copies from it into KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.push.checksums import unreadable
from millrace.transfer.push.handshake import SLOTS
from millrace.transfer.push.messages import Message, WrittenRange
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import Side, layer_runs, packed
from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs

#: Alignment of slots in bytes, so that the rows of a slot and of a page have the same grain.
ALIGN_BYTES = 256


class Staging:
    """Keeps `count` buffers of `buffer_bytes` in one region. Its own thread runs the copies."""

    def __init__(
        self, transport: Transport, pool: Memory, layout: KvLayout, *, count: int, buffer_bytes: int
    ) -> None:
        """`pool`: that of `layout`. Raises ConfigError for a pool in device memory, where the host
        can't scatter, or where other ranks have a part of it.
        """
        if where := unreadable(pool, layout):
            raise ConfigError(
                f"transfer.buffer_bytes is {buffer_bytes}; it must be 0 (buffer-free) when the KV "
                f"pool {where}"
            )
        self.buffer_bytes = buffer_bytes
        self._pool = pool
        self._stride = ceil_div(buffer_bytes, ALIGN_BYTES) * ALIGN_BYTES
        self._bytes = np.zeros(count * self._stride, dtype=np.uint8)
        self._memory = Memory.of_array(self._bytes)
        self.region = transport.register(self._memory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-scatter")

    def offset(self, backend: int) -> int:
        """Returns where a backend's buffer begins in the region, in bytes."""
        return backend * self._stride

    def scatter(
        self, message: Message, backend: int, sender: KvLayout, receiver: Side
    ) -> Future[None]:
        """Copies a slot's parts into the pages. The future is done when the slot may be written
        again.
        """
        offset = slot_offset(self.offset(backend), self.buffer_bytes, message.slot)
        return self._thread.submit(self._scatter, message.parts, offset, sender, receiver)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _scatter(
        self, parts: Sequence[WrittenRange], offset: int, sender: KvLayout, receiver: Side
    ) -> None:
        if (nbytes := sum(part.nbytes for part in parts)) > slot_bytes(self.buffer_bytes):
            raise ValueError(f"{nbytes} bytes can't lie in one slot")
        for part in parts:
            runs = _runs_of(sender, receiver, part.start_token, part.num_tokens)
            runs = runs.shifted(offset, receiver.layout.layer_offset(part.layer))
            copy_on_host(self._memory, self._pool, runs)
            offset += part.nbytes


@lru_cache(maxsize=16)
def _runs_of(sender: KvLayout, receiver: Side, start_token: int, num_tokens: int) -> Runs:
    """Returns the runs from a slot's beginning to the first layer; cached for a chunk's layers."""
    slot = packed(sender, receiver, start_token, num_tokens)
    return layer_runs(slot, receiver, start_token, num_tokens)


def slot_bytes(buffer_bytes: int) -> int:
    """Returns the size of each slot of a buffer, in bytes."""
    share = buffer_bytes // SLOTS
    return share - share % ALIGN_BYTES or share


def slot_offset(buffer_offset: int, buffer_bytes: int, slot: int) -> int:
    """Returns where a slot of a buffer begins in the staging region; uses of a slot are `SLOTS`
    apart.
    """
    return buffer_offset + slot % SLOTS * slot_bytes(buffer_bytes)


def slot_tokens(buffer_bytes: int, token_bytes: int) -> int:
    """Returns how many tokens of one layer fit in a slot."""
    return slot_bytes(buffer_bytes) // token_bytes
