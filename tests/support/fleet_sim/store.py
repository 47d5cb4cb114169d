"""The store of the simulation: the real one in memory, behind a network that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.core.config import StoreConfig
from millrace.state.leases import MemoryLeases
from millrace.state.memory_store import MemoryStore
from millrace.state.store import StoreError
from millrace.state.streams import MemoryStreams
from support.fleet_sim.processes import Process, VirtualLoop


class Store:
    """What Redis holds. `mode`: "up"; "away", it gets no call; "mute", its answers are lost."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.mode = "up"
        self.lose_data()

    def lose_data(self) -> None:
        self.records = MemoryStore(StoreConfig(), clock=self._loop.time)
        self.leases = MemoryLeases(clock=self._loop.unix_s)
        self.streams = MemoryStreams(clock=self._loop.time)


class StoreLink:
    """One process's way to the records, to the leases or to the streams (`part`)."""

    def __init__(self, store: Store, part: str, process: Process) -> None:
        self._store, self._part, self._process = store, part, process

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            process = self._process
            if process.has_lost or process.is_cut or self._store.mode == "away":
                raise StoreError("the store is away")
            answer = await getattr(getattr(self._store, self._part), name)(*args, **kwargs)
            if self._store.mode == "mute":
                raise StoreError("the answer was lost")
            return answer

        return call
