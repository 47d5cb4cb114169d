"""NIXL by itself between two pools: the reference of `millrace bench transfer`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.errors import TransferError
from millrace.transfer.transport.nixl.descriptors import descriptor_rows, segment
from millrace.transfer.transport.nixl.library import nixl_api
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

RECEIVER = "bench-bare-receiver"


def bare_agent(name: str, memory: Memory) -> Any:  # noqa: ANN401 - NIXL has no types
    """Returns an agent as `NixlTransport` makes it, with one region."""
    nixl = nixl_api()
    strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)
    agent = nixl.nixl_agent(name, config)
    region = np.array([[memory.pointer, memory.nbytes, 0]], dtype=np.uint64)
    agent.register_memory(region, segment(memory))
    return agent


class BareReceiver:
    """The target of bare writes; a thread polls its agent on demand."""

    def __init__(self, pool: Memory) -> None:
        self._agent = bare_agent(RECEIVER, pool)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._polling = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def poll(self, wanted: bool) -> None:
        if wanted:
            self._polling.set()
        else:
            self._polling.clear()

    def _work(self) -> None:
        while self._polling.wait():
            self._agent.get_new_notifs()
            time.sleep(50e-6)


class BareWriter:
    """Posts writes, and waits for their ends in a loop that does nothing else."""

    def __init__(self, pool: Memory, peer_pool: Memory, metadata: bytes) -> None:
        self._pools = (pool, peer_pool)
        self._agent = bare_agent("bench-bare-sender", pool)
        self._agent.add_remote_agent(metadata)
        self._agent.make_connection(RECEIVER)

    def write(self, requests: Sequence[Runs], in_flight: int = 1) -> float:
        """Returns seconds for all requests, one write each, `in_flight` at a time."""
        rows = [
            tuple(
                descriptor_rows(pool, starts, runs.length)
                for pool, starts in zip(self._pools, (runs.source, runs.target), strict=True)
            )
            for runs in requests
        ]
        handles: deque[Any] = deque()
        started_s = time.perf_counter()
        for pair in rows:
            if len(handles) == in_flight:
                self._wait(handles.popleft())
            ends = (self._agent.get_xfer_descs(end, segment(self._pools[0])) for end in pair)
            handle = self._agent.initialize_xfer("WRITE", *ends, RECEIVER, b"done")
            self._agent.transfer(handle)
            handles.append(handle)
        while handles:
            self._wait(handles.popleft())
        return time.perf_counter() - started_s

    def _wait(self, handle: Any) -> None:  # noqa: ANN401 - NIXL has no types
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            pass
        handle.release()
        if state != "DONE":
            raise TransferError(f"the bare NIXL write failed: {state}")
