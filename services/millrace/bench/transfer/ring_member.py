"""One process of `bench.transfer.ring`: a ring member, and a bare NIXL agent over the same pool."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.bench.transfer.bare import bare_agent
from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import RING_BUFFERS, Layout, buffer_of
from millrace.engine.kv.pool import KvPool
from millrace.transfer.ring.manager import ChunkLink, GroupLink, PeerInfo, RingManager
from millrace.transfer.ring.page_runs import page_runs
from millrace.transfer.transport.nixl.descriptors import descriptor_rows, segment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)

#: Bare writes in flight at a time, like the two blocks of a ring.
IN_FLIGHT = 2
#: Seconds between checks of a bare member that only waits for others.
POLL_S = 50e-6

#: A member's start and end, in seconds of time.monotonic: the same clock in all processes.
Span = tuple[float, float]


class RingMember:
    """A member. The other members `meet` its `introduction`, by rank."""

    def __init__(self, rank: int, kv: KvLayout, laid: Layout) -> None:
        self._rank = rank
        self._kv = kv
        self._laid = laid
        self._size = len(laid.members)
        self._pool = KvPool(kv).storage.fill_(1)  # memory in use, as a prompt's is
        memory = Memory.of_tensor(self._pool)
        self._transport = NixlTransport(f"ring-{rank}-{os.getpid()}")
        region = self._transport.register(memory)
        self._manager = RingManager(self._transport, kv, region, TransferConfig())
        lent = RING_BUFFERS * laid.buffer_pages(kv.num_layers)
        self._me = PeerInfo(
            instance_id=laid.members[rank],
            peer=self._transport.name,
            region=region,
            pages=tuple(range(kv.num_pages - lent)),
            buffer_pages=tuple(range(kv.num_pages - lent, kv.num_pages)),
            layout=kv,
            generation=1,
        )
        self._bare = BareMember(f"bare-{rank}-{os.getpid()}", memory)
        self.introduction = (self._me, self._transport.metadata(), self._bare.introduction)

    def meet(self, introduced: Sequence[Any]) -> None:
        """Connects to all others. `introduced`: the `introduction` of every member."""
        self._peers = {}
        for info, metadata, _ in introduced:
            if info.instance_id != self._me.instance_id:
                self._transport.connect(metadata).result()
                self._peers[info.instance_id] = info
        follower, _, bare = introduced[(self._rank + 1) % self._size]
        self._bare.connect(bare, self._writes(follower))

    async def exchange(self, number: int) -> Span:
        """Sends one pass of all layers round the ring."""
        link = self._manager.open(f"exchange-{number}", 1, self._me, self._peers, log.error)
        chunk = link.chunk(self._laid.chunks[0], lambda call: call())
        span = await asyncio.to_thread(self._go_round, link, chunk)
        await link.close()
        return span

    async def bare(self) -> Span:
        """Does the same writes by NIXL alone."""
        return self._bare.write_all()

    def _go_round(self, link: GroupLink, chunk: ChunkLink) -> Span:
        started_s = time.monotonic()
        chunk.begin_pass(0)
        for layer in range(self._kv.num_layers):
            chunk.publish(layer)
            for step in range(1, self._size):
                if not chunk.wait(step):
                    raise TransferError(f"{self._me.instance_id}: the exchange was aborted")
                chunk.release(step)
        chunk.end()
        return started_s, time.monotonic()

    def _writes(self, follower: PeerInfo) -> list[Runs]:
        """Returns all writes of an exchange, in order."""
        count = len(self._me.pages)
        writes = []
        for layer in range(self._kv.num_layers):
            for step in range(self._size - 1):
                source = np.arange(count, dtype=np.int64) + layer * self._kv.num_pages
                if step:
                    source = self._me.buffer(buffer_of(step))[:count]
                target = follower.buffer(buffer_of(step + 1))[:count]
                writes.append(page_runs(self._kv, source, follower.layout, target))
        return writes


class BareMember:
    """An agent that writes to the next member; the previous member writes to it."""

    def __init__(self, name: str, memory: Memory) -> None:
        self._agent = bare_agent(name, memory)
        self._memory = memory
        self.introduction = (name, memory, self._agent.get_agent_metadata())

    def connect(self, follower: tuple[str, Memory, bytes], writes: Sequence[Runs]) -> None:
        self._follower, memory, metadata = follower
        self._agent.add_remote_agent(metadata)
        self._agent.make_connection(self._follower)
        self._rows = [
            tuple(
                descriptor_rows(side, starts, runs.length)
                for side, starts in ((self._memory, runs.source), (memory, runs.target))
            )
            for runs in writes
        ]

    def write_all(self) -> Span:
        started_s = time.monotonic()
        handles: deque[Any] = deque()
        waiting, came = deque(self._rows), 0
        while waiting or handles or came < len(self._rows):
            if waiting and len(handles) < IN_FLIGHT:
                kind = segment(self._memory)
                ends = (self._agent.get_xfer_descs(rows, kind) for rows in waiting.popleft())
                handle = self._agent.initialize_xfer("WRITE", *ends, self._follower, b"done")
                self._agent.transfer(handle)
                handles.append(handle)
            if handles and (state := self._agent.check_xfer_state(handles[0])) != "PROC":
                handles.popleft().release()
                if state != "DONE":
                    raise TransferError(f"a bare NIXL write failed: {state}")
            came += sum(len(words) for words in self._agent.get_new_notifs().values())
            if not waiting and not handles:
                time.sleep(POLL_S)  # leaves the core to members that still write

        return started_s, time.monotonic()
