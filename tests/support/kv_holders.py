"""KV receivers beside live prefill roles: they keep the received KV and report it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.scheduler.commands import Member
from millrace.core.token_events import FinishedPrefill
from millrace.transfer.push.control import ReceiveCallbacks
from support.deadlines import HANG_S
from support.kv_nodes import ServedReceiver, read
from support.memory_transport import MemoryHub, MemoryTransport


class Holder(ServedReceiver):
    """A receiver on `made`'s pages. `finished` has the end message of each request."""

    def __init__(self, name: str, hub: MemoryHub, made: KvLayout, config: TransferConfig) -> None:
        self.finished: dict[str, FinishedPrefill] = {}
        self._ended: dict[str, asyncio.Future[str]] = {}
        self._shards: dict[str, tuple[list[int], int]] = {}
        callbacks = ReceiveCallbacks(
            on_first_tokens=self.finished.__setitem__,
            on_landed=lambda i: self._ended[i].set_result("landed"),
            on_prefix=lambda i, attempt, tokens: None,
            on_failed=lambda i, message, attempt, kept: self._ended[i].set_result(message),
        )
        self.life = Incarnation(name, 7)
        super().__init__(self.life, MemoryTransport(name, hub), made, config, callbacks)

    @property
    def member(self) -> Member:
        return Member(incarnation=self.life, address=self.address)

    def admit(self, request_id: str, tokens: int, shard: tuple[int, int] | None = None) -> None:
        count = shard[1] - shard[0] if shard else tokens
        pages = self.take(self.layout.pages_for(count))
        self._ended[request_id] = asyncio.get_running_loop().create_future()
        self._shards[request_id] = pages, count
        self.manager.admit(request_id, pages, tokens, shard=shard)

    async def kv(self, request_id: str) -> np.ndarray:
        """Returns the landed KV, float32 [layers, 2, heads, tokens here, head_dim]."""
        async with asyncio.timeout(HANG_S):
            assert await self._ended[request_id] == "landed"
        return read(self.pool, self.layout, *self._shards[request_id])

    async def failed(self, request_id: str) -> str:
        async with asyncio.timeout(HANG_S):
            return await self._ended[request_id]

    async def close(self) -> None:
        for request_id in self._shards:
            await self.manager.release(request_id)
        await super().close()


@asynccontextmanager
async def holders(
    count: int, hub: MemoryHub, made: KvLayout, config: TransferConfig
) -> AsyncIterator[list[Holder]]:
    """Yields `count` receivers, each with another page size; checks for leaks at the end."""
    found = []
    for number in range(count):
        own = dataclasses.replace(made, page_tokens=8 + 5 * number, num_pages=400)
        found.append(Holder(f"holder-{number}", hub, own, config))
        await found[-1].server.start()
    try:
        yield found
    finally:
        for holder in found:
            await holder.close()
