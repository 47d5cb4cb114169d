"""Groups of nodes in one process, over the memory transport: bytes, order, aborts, overlaps."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.transfer.memory_transport import MemoryHub, MemoryTransport
from support.ring_nodes import RingNode, chunks_of, pool_layout, random_pause

NAMES = ("a", "b", "c", "d")
CONFIG = TransferConfig(lease_s=0.5)


class Nodes:
    """All members in one process."""

    def __init__(self, names=NAMES, **made) -> None:
        hub = MemoryHub()
        self.all = {}
        for number, name in enumerate(names):
            made_here = pool_layout(**{"pages": 200 + 7 * number, **made})
            transport = MemoryTransport(name, hub)
            self.all[name] = RingNode(name, transport, made_here, CONFIG)
        for node in self.all.values():
            for other in self.all.values():
                if other is not node:
                    node.transport.connect(other.metadata).result()

    def prepare(self, request_id, chunks, seed, **options):
        jobs, roster = {}, {}
        for name in chunks[-1].instance_ids:
            jobs[name], roster[name] = self.all[name].prepare(request_id, chunks, seed, **options)
        return jobs, roster

    async def run(self, request_id, chunks, seed, pause_s=0.0, **options) -> None:
        """A request from joining to the end, the members' computes in threads."""
        jobs, roster = self.prepare(request_id, chunks, seed, **options)
        rng = random.Random(seed)

        async def member(name):
            node, job = self.all[name], jobs[name]
            await asyncio.sleep(rng.random() * pause_s)  # others speak before it has opened
            node.open(job, roster)
            pause = random_pause(seed + len(name), pause_s)
            assert await asyncio.to_thread(node.compute, job, pause), job.aborted_by
            await job.link.close()
            node.check_share(job)
            node.release(job)

        async with asyncio.timeout(30):
            await asyncio.gather(*(member(name) for name in jobs))
        assert not [wrong for job in jobs.values() for wrong in job.wrong]

    def check(self) -> None:
        for node in self.all.values():
            node.manager.check_integrity()
            node.check_free()

    def close(self) -> None:
        for node in self.all.values():
            node.transport.close()


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    made.check()
    made.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_blocks_of_growing_shares_reach_every_member(nodes, size, pause_s):
    chunks = chunks_of([60, 45], [NAMES[:size]] * 2)
    asyncio.run(nodes.run("r", chunks, seed=size, pause_s=pause_s))


@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 4), (2, 3), (1, 1, 3, 4)])
def test_history_reaches_new_members_before_their_chunk(nodes, sizes):
    chunks = chunks_of([37, 22, 41, 30][: len(sizes)], [NAMES[:size] for size in sizes])
    asyncio.run(nodes.run("r", chunks, seed=5, pause_s=0.002))


def test_all_parts_of_tensor_parallel_pools_travel():
    nodes = Nodes(parts=2)
    asyncio.run(nodes.run("r", chunks_of([30, 50], [NAMES[:1], NAMES[:3]]), seed=1))
    nodes.check()
    nodes.close()


def test_fewer_tokens_than_members(nodes):
    chunks = chunks_of([1, 2, 5], [NAMES[:2], NAMES[:4], NAMES[:4]])
    asyncio.run(nodes.run("r", chunks, seed=3))
