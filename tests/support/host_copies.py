"""In the place of `DeviceCopies`: copies between transports of this process in the host's memory.

They use the same arithmetic, and a test says when a copy ends.
"""

from __future__ import annotations

import queue
import threading

import torch

from millrace.transfer.transport.base import PeerLostError
from millrace.transfer.transport.device_copies import copy_runs
from millrace.transfer.transport.regions import Memory, host_bytes
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S


class HostEvent:
    """The end of a copy: asked `late` times, or when the gate opens. The bytes come only then."""

    def __init__(self, copies: HostCopies, work: tuple[Memory, Memory, Runs]) -> None:
        self._copies = copies
        self._work: tuple[Memory, Memory, Runs] | None = work
        self._left = copies.late

    def query(self) -> bool:
        if not self._copies.gate.is_set():
            return False
        self._left -= 1
        if self._left < 0:
            self._arrive()
        return self._work is None

    def synchronize(self) -> None:
        self._copies.awaited.set()
        assert self._copies.gate.wait(HANG_S)
        self._arrive()

    def _arrive(self) -> None:
        if self._work is not None:
            (source, target, runs), self._work = self._work, None
            buffer = torch.empty(1 << 16, dtype=torch.uint8)
            views = (torch.from_numpy(host_bytes(memory)) for memory in (source, target))
            copy_runs(*views, runs, buffer)


class HostCopies:
    """`Copies`. While `gate` is closed, no copy ends; `error` is raised by the next one.

    `awaited` is set when somebody waits for an end.
    """

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.begun: queue.Queue[HostEvent] = queue.Queue()
        self.awaited = threading.Event()
        self.open: set[str] = set()

    def opened(self, name: str) -> None:
        self.open.add(name)

    def closed(self, name: str) -> None:
        self.open.discard(name)
        for event in list(self.begun.queue):
            event.synchronize()

    def serves(self, peer: str, source: Memory, target: Memory) -> bool:
        return peer in self.open

    def begin(self, peer: str, source: Memory, target: Memory, runs: Runs) -> HostEvent:
        if peer not in self.open:
            raise PeerLostError(f"{peer} is closed")
        if self.error is not None:
            raise self.error
        event = HostEvent(self, (source, target, runs))
        self.begun.put(event)
        return event
