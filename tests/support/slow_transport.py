"""An in-memory transport whose writes a test delays and counts."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future

from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport


class SlowTransport(MemoryTransport):
    """A transport whose writes take up to `delay_s`, and wait until `gate` is open."""

    delay_s = 0.0

    def __init__(self, name: str, hub: MemoryHub) -> None:
        super().__init__(name, hub)
        self.gate = threading.Event()
        self.gate.set()
        self.posted: list[Future[None]] = []
        self.peers: set[str] = set()  # written to
        self.most_in_flight = 0

    @property
    def in_flight(self) -> int:
        """Returns the writes that were posted and are not done."""
        return sum(not write.done() for write in self.posted)

    def write(self, peer, *args, **kwargs) -> Future[None]:
        self.peers.add(peer)
        self.posted.append(super().write(peer, *args, **kwargs))
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self.posted[-1]

    def copy(self, *args) -> None:
        assert self.gate.wait(HANG_S)
        if self.delay_s:
            time.sleep(random.uniform(0, self.delay_s))
        super().copy(*args)
