"""The owners of resumable streams: which replica generates a stream, and until when.

A stream has one owner, which renews a lease. A stream whose lease has expired is lost: its replica
died, or has released the stream, and any replica may adopt it. Every adoption raises the fence, and
a change with another fence is refused: the former owner stops its work. A final stream never
changes again. A stream's first fence is drawn: a store that has lost its data may get a second
stream of the same id while the owner of the first still works.

A stream is wanted while a client reads it, at whichever replica, and for some time after that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from millrace.state.store import IdTaken

#: Adoptions that a stream may have before its fences could be those of another one.
_MOST_OWNERS = 1 << 8


def new_fence() -> int:
    """Draws the first fence of a stream, below 2**52: the store's scripts count in doubles."""
    return random.getrandbits(44) * _MOST_OWNERS + 1


def owner_number(fence: int) -> int:
    """Returns which owner of its stream has this fence: 1 for the first."""
    return fence % _MOST_OWNERS


class Hold(Enum):
    """What an owner learns when it renews its lease."""

    LOST = 0  # another replica has adopted the stream, or it is final
    UNWANTED = 1  # no client has read it for too long
    HELD = 2
    GONE = 3  # the store does not have it any more: nobody can adopt it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """How long the owner holds a stream without a renewal, and how long the stream is wanted."""

    held_s: float
    wanted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """A stream. `source` never changes, `body` is its owner's; both are opaque here.

    `fence` rises with every owner. `left_s`: until its owner's lease expires; `age_s`: since it was
    created; both by the store's clock. Of a final stream they mean nothing.
    """

    tenant: str
    source: bytes
    body: bytes
    fence: int
    final: bool
    left_s: float
    age_s: float

    @property
    def lost(self) -> bool:
        """Whether it is not final, and its lease has expired."""
        return not self.final and self.left_s <= 0


class StreamStore(Protocol):
    """Streams by id. Every method raises StoreError when the store can't be reached."""

    async def create(
        self,
        stream_id: str,
        *,
        tenant: str,
        source: bytes,
        body: bytes,
        lease: Lease,
        ttl_s: float,
        fence: int,
    ) -> None:
        """Records a stream, which lives for `ttl_s`. Raises IdTaken."""

    async def get(self, stream_id: str) -> StreamRecord | None:
        """Returns the stream, or None when it is deleted or expired."""

    async def renew(self, stream_id: str, fence: int, body: bytes, lease: Lease) -> Hold:
        """Changes the body and the lease. A lease of 0 s releases the stream."""

    async def want(self, stream_id: str, wanted_s: float) -> None:
        """Notes that a client reads the stream. It is wanted for at least `wanted_s` more."""

    async def adopt(self, stream_id: str, fence: int, lease: Lease, *, left_s: float = 0.0) -> bool:
        """Makes the caller the owner, with the fence `fence + 1`, if the stream is lost, or if its
        lease expires within `left_s`.

        Returns False if it is not, or if `fence` is not its fence any more.
        """

    async def finish(self, stream_id: str, fence: int, body: bytes, ttl_s: float) -> bool:
        """Makes a stream final, which then lives for `ttl_s`; 0 deletes it. May be repeated, where
        the answer of a call was lost.

        Returns False if the fence is old, or the stream was deleted or had another end before.
        """

    async def delete(self, stream_id: str, fence: int, source: bytes) -> bool:
        """Removes a stream that is not final, if it has this source.

        Returns False if the fence is old, or there is no such stream.
        """

    async def close(self) -> None:
        """Closes the store's connections."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    tenant: str
    source: bytes
    body: bytes
    created_s: float
    expires_s: float
    held_until_s: float
    wanted_until_s: float
    fence: int
    final: bool = False


class MemoryStreams:
    """A StreamStore in a dictionary. `clock` returns seconds that never decrease."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    async def create(
        self,
        stream_id: str,
        *,
        tenant: str,
        source: bytes,
        body: bytes,
        lease: Lease,
        ttl_s: float,
        fence: int,
    ) -> None:
        now_s = self._clock()
        self._entries = {k: e for k, e in self._entries.items() if e.expires_s > now_s}
        if stream_id in self._entries:
            raise IdTaken(f"stream {stream_id} is in the store already")
        self._entries[stream_id] = _Entry(
            tenant=tenant,
            source=source,
            body=body,
            created_s=now_s,
            expires_s=now_s + ttl_s,
            held_until_s=now_s + lease.held_s,
            wanted_until_s=now_s + lease.wanted_s,
            fence=fence,
        )

    async def get(self, stream_id: str) -> StreamRecord | None:
        entry = self._find(stream_id)
        if entry is None:
            return None
        return StreamRecord(
            tenant=entry.tenant,
            source=entry.source,
            body=entry.body,
            fence=entry.fence,
            final=entry.final,
            left_s=entry.held_until_s - self._clock(),
            age_s=self._clock() - entry.created_s,
        )

    async def renew(self, stream_id: str, fence: int, body: bytes, lease: Lease) -> Hold:
        entry, now_s = self._find(stream_id), self._clock()
        if entry is None:
            return Hold.GONE
        if entry.final or entry.fence != fence:
            return Hold.LOST
        entry.body, entry.held_until_s = body, now_s + lease.held_s
        entry.wanted_until_s = max(entry.wanted_until_s, now_s + lease.wanted_s)
        return Hold.HELD if now_s < entry.wanted_until_s else Hold.UNWANTED

    async def want(self, stream_id: str, wanted_s: float) -> None:
        entry = self._find(stream_id)
        if entry is not None:
            entry.wanted_until_s = max(entry.wanted_until_s, self._clock() + wanted_s)

    async def adopt(self, stream_id: str, fence: int, lease: Lease, *, left_s: float = 0.0) -> bool:
        entry, now_s = self._find(stream_id), self._clock()
        if entry is None or entry.final or entry.fence != fence:
            return False
        if entry.held_until_s > now_s + left_s:
            return False
        entry.fence, entry.held_until_s = fence + 1, now_s + lease.held_s
        entry.wanted_until_s = max(entry.wanted_until_s, now_s + lease.wanted_s)
        return True

    async def finish(self, stream_id: str, fence: int, body: bytes, ttl_s: float) -> bool:
        entry = self._find(stream_id)
        if entry is None or entry.fence != fence:
            return False
        if entry.final:
            return entry.body == body
        entry.body, entry.final, entry.expires_s = body, True, self._clock() + ttl_s
        return True

    async def delete(self, stream_id: str, fence: int, source: bytes) -> bool:
        entry = self._find(stream_id)
        if entry is None or entry.final or (entry.fence, entry.source) != (fence, source):
            return False
        del self._entries[stream_id]
        return True

    async def close(self) -> None:
        self._entries.clear()

    def _find(self, stream_id: str) -> _Entry | None:
        entry = self._entries.get(stream_id)
        return entry if entry is not None and entry.expires_s > self._clock() else None
