"""A transport inside one process: the same guarantees, with copies by the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import Handler, PeerLostError, hand_over
from millrace.transfer.transport.peers import PeerMetadata, ProcessIdentity
from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs

P = ParamSpec("P")
T = TypeVar("T")


class MemoryHub:
    """Connects the transports of one process by name."""

    def __init__(self) -> None:
        self._ends: dict[str, MemoryTransport] = {}
        self._lock = threading.Lock()

    def join(self, end: MemoryTransport) -> None:
        """Adds a transport. Raises TransferError when its name is taken."""
        with self._lock:
            if self._ends.setdefault(end.name, end) is not end:
                raise TransferError(f"a transport is named {end.name} already")

    def leave(self, end: MemoryTransport) -> None:
        with self._lock:
            self._ends.pop(end.name, None)

    def find(self, name: str) -> MemoryTransport:
        """Returns a transport. Raises PeerLostError when it has left, or never joined."""
        with self._lock:
            end = self._ends.get(name)
        if end is None:
            raise PeerLostError(f"{name} is gone")
        return end


class MemoryTransport:
    """One end. Its own thread copies the bytes of its writes, in order."""

    def __init__(self, name: str, hub: MemoryHub) -> None:
        self._name = name
        self._hub = hub
        self._regions: list[Memory] = []
        self._peers: dict[str, PeerMetadata] = {}
        self._handlers: dict[int, Handler] = {}
        self._process = ProcessIdentity.mine()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"memory {name}")
        hub.join(self)

    @property
    def name(self) -> str:
        return self._name

    def register(self, memory: Memory) -> int:
        self._regions.append(memory)
        return len(self._regions) - 1

    def metadata(self) -> bytes:
        return PeerMetadata(
            name=self._name, regions=tuple(self._regions), process=self._process
        ).encode()

    def connect(self, metadata: bytes) -> Future[str]:
        return self._submit(self._connect, metadata)

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
        return self._submit(self.copy, peer, runs, notification, (region, peer_region))

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        return self._submit(self._notify, peer, payload)

    def subscribe(self, channel: int, handler: Handler) -> None:
        if channel in self._handlers:
            raise ValueError(f"channel {channel} has a handler already")
        self._handlers[channel] = handler

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Does nothing: writes here need no help of their target."""
        yield

    def progress(self) -> bool:
        """Does nothing: only the end's thread keeps its writes in order."""
        return False

    def is_dead(self, peer: str) -> bool:
        if peer not in self._peers:
            return False
        try:
            self._hub.find(peer)
        except PeerLostError:
            return True
        return False

    def disconnect(self, peer: str) -> Future[None]:
        return self._submit(self._disconnect, peer)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hub.leave(self)
            self._thread.shutdown(wait=True, cancel_futures=True)

    def deliver(self, sender: str, payload: bytes) -> None:
        """Takes a notification of a peer, on the peer's thread."""
        hand_over(self._handlers, sender, payload)

    def _submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        # `close` cancels waiting writes, and their callbacks come here. The executor must not be
        # called then: asked by the thread that shuts it down, it would wait for itself.
        if not self._closed:
            with suppress(RuntimeError):  # another thread has just shut it down
                return self._thread.submit(call, *args, **kwargs)
        future: Future[T] = Future()
        future.set_exception(PeerLostError(f"transport {self._name} is closed"))
        return future

    def _connect(self, metadata: bytes) -> str:
        peer = PeerMetadata.decode(metadata)
        self._hub.find(peer.name)
        known = self._peers.get(peer.name)
        if known is None or not known.includes(peer):
            self._peers[peer.name] = peer
        return peer.name

    def copy(self, peer: str, runs: Runs, notification: bytes, regions: tuple[int, int]) -> None:
        """Carries a write out, on this end's thread. Tests inject faults and delays here."""
        known, end = self._require(peer)
        try:
            copy_on_host(self._regions[regions[0]], known.regions[regions[1]], runs)
        except (IndexError, ValueError) as error:
            raise TransferError(f"write to {peer}: {error}") from error
        if notification:
            end.deliver(self._name, notification)

    def _notify(self, peer: str, payload: bytes) -> None:
        self._require(peer)[1].deliver(self._name, payload)

    def _disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def _require(self, peer: str) -> tuple[PeerMetadata, MemoryTransport]:
        if peer not in self._peers:
            raise PeerLostError(f"{peer} is not connected")
        return self._peers[peer], self._hub.find(peer)
