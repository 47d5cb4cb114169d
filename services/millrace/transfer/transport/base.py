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

#: The most bytes that go faster in a notification than in a write with a notification: they arrive
#: in a third of the time. From a far larger size on UCX asks the peer before it sends.
INLINE_BYTES: Final = 72 << 10

#: Called with (peer's name, payload) on the transport's thread.
Handler = Callable[[str, bytes], None]


class PeerLostError(TransferError):
    """The connection to a peer broke: its process ended, or nothing reaches it any more."""


def hand_over(handlers: Mapping[int, Handler], peer: str, payload: bytes) -> None:
    """Gives a notification to its channel's handler; logs and drops a notification without a
    handler.
    """
    handler = handlers.get(payload[0]) if payload else None
    if handler is None:
        log.warning("dropped a notification of %s on no known channel", peer)
        return
    try:
        handler(peer, payload)
    except Exception:
        log.exception("the handler of a notification from %s failed", peer)


async def outcome(future: Future[T]) -> T:
    """Awaits a transport's future from asyncio; a done future costs no round of the loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


class Transport(Protocol):
    """One process's end of the paths on which KV travels. Every implementation passes
    `tests/contract/test_transport.py`.
    """

    @property
    def name(self) -> str:
        """The transport's name, unique over all incarnations of all processes that may ever
        meet.
        """

    def register(self, memory: Memory) -> int:
        """Opens a region to writes, ours and peers'. Returns its index: 0, 1, ... in order."""

    def metadata(self) -> bytes:
        """Returns the data that a peer needs to `connect` to this transport, with the regions
        that are registered so far. Only the first call after a `register` may wait. So ask when
        they are sent: those from before a `register` would hide the later region.
        """

    def connect(self, metadata: bytes) -> Future[str]:
        """Makes the peer of `metadata` known and returns its name; does nothing for a known peer.

        Raises TransferError for bytes that are not metadata.
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
        """Writes `runs` of our `region` to `peer_region` of the peer, which gets `notification`
        after the last byte. An empty notification is not sent.

        The future is done once the peer's memory holds the bytes. It raises PeerLostError; or
        TransferError for an unknown peer, or for runs that leave a region. A write can be cancelled
        until it is posted. A running future can't be cancelled, and ends when our memory is no
        longer read. `urgent` is for few bytes for which a caller waits: the calling thread posts
        them itself if it can.
        """

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        """Sends a notification alone. The future raises PeerLostError; a done future does not
        prove that the notification arrived.

        `urgent` works as in `write`.
        """

    def subscribe(self, channel: int, handler: Handler) -> None:
        """Sends notifications whose first byte is `channel` to `handler`. A channel has one
        handler.
        """

    def listening(self) -> AbstractContextManager[None]:
        """While open, the transport actively polls for incoming data and notifications.

        A peer's writes may make no progress until this side listens.
        """

    def progress(self) -> bool:
        """Does the transport's pending work on the calling thread.

        A caller that waits for a peer's answer calls this between two checks, as the transport's
        own thread would take longer. Returns False if only the transport's thread can do the work.
        """

    def is_dead(self, peer: str) -> bool:
        """Returns True once the peer's process is known to have ended; else False."""

    def disconnect(self, peer: str) -> Future[None]:
        """Forgets a peer. Writes in flight to it fail with PeerLostError and may still land."""

    def close(self) -> None:
        """Ends the thread and frees everything. Pending futures fail. Blocks until done."""
