"""The loopback probe of an instance of several ranks: every rank's agent and pool are checked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest

from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.probe.pattern import End, ProbeError, probe_loopback
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.transport.regions import JoinedBytes, Memory
from support.deadlines import HANG_S
from support.kv_nodes import layout
from support.rank_agents import RankedInstance, SharedBytes

RANKS: KvLayout = dataclasses.replace(layout(), parts=2)
PARTS = {pool.name: pool.start for pool in RANKS.member_pools}


class AllPools:
    """The region of all ranks, as an instance has it; notes which ranks are written to."""

    def __init__(self, ranks: RankedInstance) -> None:
        own = SharedBytes(ranks.pools[0].array.reshape(-1).view(np.uint8))
        self._joined = JoinedBytes([own, *(agent.pool for agent in ranks.agents)])
        self.nbytes = self._joined.nbytes
        self._part = ranks.layout.part_bytes
        self.touched: set[int] = set()
        self.spoiled: int | None = None  # a rank whose memory takes no byte

    def read(self, start: int, count: int) -> bytes:
        return self._joined.read(start, count)

    def write(self, start: int, data: bytes) -> None:
        rank = start // self._part
        self.touched.add(rank)
        if rank != self.spoiled:
            self._joined.write(start, data)


@pytest.fixture
async def ranks() -> AsyncIterator[RankedInstance]:
    made = await asyncio.to_thread(RankedInstance, RANKS)
    yield made
    await asyncio.to_thread(made.close)


async def probe(ranks: RankedInstance, pools: AllPools) -> list[str]:
    """Returns the names of the other ends."""
    names: list[str] = []
    region = ranks.transport.register(Memory.of_tensor(ranks.pools[0]))
    async with ProbeServer(ranks.transport.name, "cpu") as server:

        @contextlib.asynccontextmanager
        async def open_end(name: str, seed: int, size: int) -> AsyncIterator[End]:
            names.append(name)
            async with server.open_end(name, seed, size) as end:
                yield end

        await probe_loopback(ranks.transport, region, pools, open_end, HANG_S, PARTS)
    return names


async def test_every_rank_sends_and_receives_and_keeps_its_bytes(ranks: RankedInstance) -> None:
    for number, pool in enumerate(ranks.pools):
        pool.array[:] = number + 1
    pools = AllPools(ranks)
    assert await probe(ranks, pools) == ["loopback-0-1", "loopback-1-1"]
    assert pools.touched == {0, 1}
    for number, pool in enumerate(ranks.pools):
        assert (pool.array == number + 1).all()


async def test_a_rank_that_sends_other_bytes_is_named(ranks: RankedInstance) -> None:
    pools = AllPools(ranks)
    pools.spoiled = 1
    with pytest.raises(ProbeError, match=r"rank 1: byte 0 of .* is not what the peer wrote"):
        await probe(ranks, pools)


async def test_a_rank_without_an_agent_is_named(ranks: RankedInstance) -> None:
    pools = AllPools(ranks)
    region = ranks.transport.register(Memory.of_tensor(ranks.pools[0]))
    assert region == 0
    await asyncio.to_thread(ranks.signal, 1, signal.SIGKILL)
    with pytest.raises(TransferError, match="rank 1 of this instance is gone"):
        await probe(ranks, pools)
