"""Writes that are under way: those that NIXL makes, and those that the GPU of both sides makes."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.transfer.transport.nixl.descriptors import descriptor_rows, segment
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)


class Posted(Protocol):
    """A write, from its post on. Only the thread that holds the agent calls it."""

    def post(self) -> None:
        """Begins. Returns at once, or when the bytes lie there."""

    def has_ended(self) -> bool:
        """Returns whether the peer has the bytes, and has been sent the notification. Raises what
        went wrong.
        """

    def release(self) -> None:
        """Frees what the write holds."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteInFlight:
    """A posted write and its future. `on_host`: UCX copies its bytes inside our polls; a device
    copies by itself, and polls only find out when it has ended.
    """

    peer: str
    posted: Posted
    future: Future[None]
    on_host: bool


class NixlWrite:
    """A write of NIXL's, which sends the notification too."""

    def __init__(
        self,
        agent: Any,  # noqa: ANN401 - NIXL has no types
        peer: str,
        sides: tuple[Memory, Memory],
        runs: Runs,
        notification: bytes,
    ) -> None:
        """`sides`: the regions of source and target; no run may leave them."""
        self._agent = agent
        descriptors = (
            agent.get_xfer_descs(descriptor_rows(memory, starts, runs.length), segment(memory))
            for memory, starts in zip(sides, (runs.source, runs.target), strict=True)
        )
        self._peer = peer
        self._handle = agent.initialize_xfer("WRITE", *descriptors, peer, notification)

    def post(self) -> None:
        self._agent.transfer(self._handle)

    def has_ended(self) -> bool:
        state = self._agent.check_xfer_state(self._handle)
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"NIXL says {state}")
        return bool(state == "DONE")

    def release(self) -> None:
        try:
            self._handle.release()
        except Exception as error:
            log.warning("NIXL kept the handle of a write to %s: %s", self._peer, error)


class Event(Protocol):
    """What `torch.cuda.Event` shows of a copy."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Copies(Protocol):
    """Copies between the memory of this process's transports, which say when they are open."""

    def opened(self, name: str) -> None: ...
    def closed(self, name: str) -> None:
        """Returns when no copy reads or writes the transport's memory, nor ever will."""

    def serves(self, peer: str, source: Memory, target: Memory) -> bool:
        """Returns whether `begin` can copy between these two."""

    def begin(self, peer: str, source: Memory, target: Memory, runs: Runs) -> Event:
        """Returns at once with the event that has passed when the bytes lie there. Raises
        PeerLostError for a peer that has closed since; after any error nothing is read.
        """


class CopiedWrite:
    """A write whose bytes are copied, and whose notification NIXL sends when they lie there."""

    def __init__(
        self,
        agent: Any,  # noqa: ANN401 - NIXL has no types
        peer: str,
        sides: tuple[Memory, Memory],
        runs: Runs,
        notification: bytes,
        copies: Copies,
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._sides = sides
        self._runs = runs
        self._notification = notification
        self._copies = copies
        self._event: Event | None = None

    def post(self) -> None:
        self._event = self._copies.begin(self._peer, *self._sides, self._runs)

    def has_ended(self) -> bool:
        assert self._event is not None  # it was posted
        if not self._event.query():
            return False
        if self._notification:
            self._agent.send_notif(self._peer, self._notification)
        return True

    def release(self) -> None:
        """Waits for a copy that was given up: until it ends, it reads our memory."""
        if self._event is None:
            return
        try:
            self._event.synchronize()
        except Exception as error:
            log.warning("a copy to %s ended with an error: %s", self._peer, error)
