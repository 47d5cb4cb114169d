"""A ring with checksums over a network that changes or shortens one message or write."""

from __future__ import annotations

import asyncio
import random

import pytest

from millrace.core.config import TransferConfig
from millrace.transfer.transport.checked import CheckedTransport
from support.deadlines import HANG_S
from support.faulty_transport import FaultyTransport
from support.memory_transport import MemoryHub, MemoryTransport
from support.seeds import seeds
from transfer.ring.ring_nodes import Job, RingNode, chunks_of, pool_layout

NAMES = ("a", "b", "c")
CONFIG = TransferConfig(lease_s=10 * HANG_S)


class Net:
    """Nodes whose transports lie once in all, at a call that the seed chooses."""

    def __init__(self, seed: int, fault: str, *, on_writes: bool) -> None:
        hub = MemoryHub()
        rng = random.Random(seed)
        liar = rng.choice(NAMES)
        self.nets = {
            name: FaultyTransport(
                MemoryTransport(name, hub),
                seed,
                faults=(fault,),
                probability=rng.choice([0.1, 0.5]) if name == liar else 0.0,
                most=1,
                on_writes=on_writes,
                on_notifications=not on_writes,
            )
            for name in NAMES
        }
        self.corrupt: list[str] = []
        self.nodes = {}
        for name, net in self.nets.items():
            transport = CheckedTransport(net, checks=True, on_corrupt=self.corrupt.append)
            self.nodes[name] = RingNode(name, transport, pool_layout(pages=200), CONFIG)
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node:
                    node.transport.connect(other.metadata).result()

    async def run(self) -> dict[str, Job]:
        """Runs a request whose group grows, to its end or to its abort by all members."""
        chunks = chunks_of([40, 70], [NAMES[:2], NAMES])
        jobs, roster = {}, {}
        for name, node in self.nodes.items():
            jobs[name], roster[name] = node.prepare("r", chunks, 1)

        async def member(name: str) -> None:
            node, job = self.nodes[name], jobs[name]
            node.open(job, roster)
            await asyncio.to_thread(node.compute, job)
            await job.link.close()

        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(member(name) for name in NAMES))
        return jobs

    def close(self) -> None:
        for node in self.nodes.values():
            node.transport.close()


@pytest.mark.parametrize("on_writes", [True, False])
@pytest.mark.parametrize("fault", ["corrupt", "truncate"])
@pytest.mark.parametrize("seed", seeds(4, 40))
async def test_no_fault_gives_wrong_history_or_blocks(seed: int, fault: str, on_writes: bool):
    net = Net(seed, fault, on_writes=on_writes)
    jobs = await net.run()
    lied = sum(one.seen.total() for one in net.nets.values())
    reasons = [reason for job in jobs.values() for reason in job.aborted_by]
    for name, job in jobs.items():
        assert not job.wrong
        if not reasons:
            net.nodes[name].check_share(job)
        net.nodes[name].release(job)
        net.nodes[name].check_free()
        net.nodes[name].manager.check_integrity()
    assert not [wrong for job in jobs.values() for wrong in job.wrong]
    assert bool(net.corrupt) == bool(reasons)
    # The end of a write that is cut off may have lain there before: then nothing is wrong.
    assert bool(lied) == bool(reasons) or (lied and fault == "truncate" and on_writes)
    assert all("not a notification" in why or "gave up" in why for why in reasons)
    net.close()
