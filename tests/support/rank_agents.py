"""Instances of several ranks: rank 0 in the test's process, the others in processes of their own.

The pools are shared with the test, which fills and reads them; the transports know nothing of that.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from millrace.core.kv.layout import KvLayout
from millrace.transfer.transport.joined import JoinedTransport
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.remote import RemoteAgent, serve_agent
from support.deadlines import HANG_S
from support.transfer_peers import transport_environment

os.environ.update(transport_environment("127.0.0.1"))
_numbers = itertools.count()


class SharedBytes:
    """A rank's pool as a `ByteView`."""

    def __init__(self, seen: np.ndarray) -> None:
        self._seen = seen
        self.memory = Memory.of_array(seen)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def read(self, start: int, count: int) -> bytes:
        return self._seen[start : start + count].tobytes()

    def write(self, start: int, data: bytes) -> None:
        self._seen[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)


def serve_rank(pipe: Connection, pool: Any) -> None:
    """A rank's process: it serves its agent, and nothing else."""
    seen = np.frombuffer(pool, dtype=np.uint8)
    serve_agent(pipe, NixlTransport, lambda: SharedBytes(seen))


class RankPool:
    """A rank's pool, float32, as a tensor for a manager."""

    def __init__(self, layout: KvLayout, shared: Any) -> None:
        shape = (layout.num_layers, layout.num_pages, 2, layout.part_heads)
        flat = np.frombuffer(shared, dtype=np.float32)
        self.array = flat.reshape(*shape, layout.page_tokens, layout.head_dim)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def get_device(self) -> int:
        return HOST

    def is_contiguous(self) -> bool:
        return True


class RankedInstance:
    """The pools and agents of an instance. `pools[rank].array` is a rank's KV."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        name = f"ranks-{os.getpid()}-{next(_numbers)}"
        context = mp.get_context("spawn")
        shared = [context.RawArray("B", layout.part_bytes) for _ in range(layout.ranks)]
        self.pools = [RankPool(layout, one) for one in shared]
        pipes, self.processes = [], []
        for one in shared[1:]:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(theirs, one), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            self.processes.append(process)
        self.agents = [
            RemoteAgent(pipe, f"rank {rank}", f"{name}.{rank}")
            for rank, pipe in enumerate(pipes, start=1)
        ]
        memories = [Memory.of_tensor(self.pools[0]), *(agent.pool.memory for agent in self.agents)]
        self.transport = JoinedTransport(NixlTransport(name), self.agents, memories)

    def signal(self, rank: int, number: signal.Signals) -> None:
        process = self.processes[rank - 1]
        assert process.pid is not None
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(HANG_S)

    def fill(self, pages: list[int], kv: np.ndarray) -> None:
        """kv: float32 [layers, 2, heads of the model, tokens, head_dim]."""
        made = self.layout
        for rank, pool in enumerate(self.pools):
            own = kv[:, :, list(made.heads_of(rank))]
            for token in range(kv.shape[3]):
                page, row = pages[token // made.page_tokens], token % made.page_tokens
                pool.array[:, page, :, :, row] = own[:, :, :, token]

    def holds(self, pages: list[int], kv: np.ndarray) -> bool:
        """Whether every rank has its heads of the prompt in these pages, to the bit."""
        made = self.layout
        for rank, pool in enumerate(self.pools):
            rows = pool.array[:, pages].transpose(0, 2, 3, 1, 4, 5)
            shape = (made.num_layers, 2, made.part_heads, -1, made.head_dim)
            found = rows.reshape(shape)[:, :, :, : kv.shape[3]]
            if not (found == kv[:, :, list(made.heads_of(rank))]).all():
                return False
        return True

    def close(self) -> None:
        self.transport.close()
        for process in self.processes:
            process.join(HANG_S)
            assert process.exitcode is not None
