"""Moves bytes between processes: one-sided writes with a notification, and notifications alone.

All data between pods uses this interface. Methods may be called from any thread and return at once.
A future's callbacks and handlers run on the transport's thread, or on a thread that calls
`progress`; they must be short. From asyncio, await a future's `outcome`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar

from millrace.core.errors import TransferError
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Up to so many bytes are better off in a notification than in a write and a notification behind
#: it: they arrive in a third of the time. Some way below where UCX begins to ask before it sends.
INLINE_BYTES: Final = 72 << 10

#: Called with (peer's name, payload) on the transport's thread.
Handler = Callable[[str, bytes], None]


class PeerLostError(TransferError):
    """The connection to a peer broke: its process ended, or nothing reaches it any more."""


def hand_over(handlers: Mapping[int, Handler], peer: str, payload: bytes) -> None:
    """Gives a notification to its channel's handler; what nobody takes is logged and dropped."""
    handler = handlers.get(payload[0]) if payload else None
    if handler is None:
        log.warning("dropped a notification of %s on no known channel", peer)
        return
    try:
        handler(peer, payload)
    except Exception:
        log.exception("the handler of a notification from %s failed", peer)


async def outcome(future: Future[T]) -> T:
    """Awaits a transport's future from asyncio; one that is done costs no round of the loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


class Transport(Protocol):
    """One process's end. Both implementations pass `tests/contract/test_transport.py`."""

    @property
    def name(self) -> str:
        """Unique among all lives of all processes that may ever meet."""

    def register(self, memory: Memory) -> int:
        """Opens a region to writes, ours and peers'. Returns its index: 0, 1, ... in order."""

    def metadata(self) -> bytes:
        """What a peer needs to `connect` here. Covers the regions registered so far."""

    def connect(self, metadata: bytes) -> Future[str]:
        """Makes the peer of `metadata` known and gives its name; known already: does nothing.

        Raises TransferError for bytes that are no metadata.
        """

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
        """Writes runs of our `region` to the peer's; it gets `notification` after the last byte.

        Done once the peer's memory holds the bytes. Raises PeerLostError, or TransferError for an
        unknown peer or runs that leave a region. Cancelling works until the write is posted; a
        future that runs can't be cancelled, and says when our memory is no longer read. `urgent`:
        few bytes that somebody waits for; the calling thread posts them itself where it can.
        """

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        """Sends a notification alone. Raises PeerLostError; done says nothing of its arrival.

        `urgent`: as of `write`.
        """

    def subscribe(self, channel: int, handler: Handler) -> None:
        """Notifications whose first byte is `channel` go to `handler`. One handler a channel."""

    def listening(self) -> AbstractContextManager[None]:
        """While open, incoming data and notifications are waited for actively.

        A peer's writes may make no progress until this side listens.
        """

    def progress(self) -> bool:
        """Does the transport's work, as far as there is any, on the calling thread.

        For one that waits for a peer's answer, between two looks for it: the way over the
        transport's own thread takes longer. False: that thread alone can do it.
        """

    def is_dead(self, peer: str) -> bool:
        """True once the peer's process is known to have ended; False if it lives or who knows."""

    def disconnect(self, peer: str) -> Future[None]:
        """Forgets a peer. Writes in flight to it fail with PeerLostError and may still land."""

    def close(self) -> None:
        """Ends the thread and frees everything. Pending futures fail. Blocks until done."""
