"""Runs a KVP worker: pages for shards of long requests and attention over them, without a model."""

from __future__ import annotations

import logging

import grpc

from millrace.core.scheduler.commands import Cancel, Command, Drain
from millrace.core.scheduler.reports import CachedBlocks, Heartbeat, Registration
from millrace.engine.assembly import KvMemory
from millrace.instance.role import HostContext
from millrace.instance.shards.kvp_servicer import KvpServicer
from millrace.instance.shards.shard_host import ShardHost
from millrace.instance.shards.shard_table import NOBODY, ShardTable
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.receive.manager import ReceiveManager

log = logging.getLogger(__name__)


class KvpRole:
    """The role of a KVP worker. It holds shards only; other instances own the requests."""

    name = "kvp"

    def __init__(self, context: HostContext, memory: KvMemory) -> None:
        self._pool = memory.pool
        self._table = ShardTable()
        self._receiver = ReceiveManager(
            transport=context.transport,
            layout=memory.layout,
            storage=memory.storage,
            identity=context.incarnation,
            config=context.config.transfer,
            callbacks=self._table.beside(NOBODY, context.on_corrupt),
        )
        self._shards = ShardHost(context, memory, self._table, self._receiver)

    @property
    def kv_region(self) -> int:
        return self._receiver.region

    def attach(self, server: grpc.aio.Server) -> None:
        KvReceiverServicer(self._receiver).add_to(server)
        KvpServicer(self._shards).add_to(server)

    def complete_registration(self, base: Registration) -> Registration:
        return base

    def counts(self) -> tuple[int, int]:
        return self._table.counts()

    def heartbeat(self) -> Heartbeat:
        running, waiting = self.counts()
        return Heartbeat(free_pages=self._pool.free_pages, running=running, waiting=waiting)

    def cached_blocks(self) -> CachedBlocks | None:
        return None  # shards leave no blocks

    def on_command(self, command: Command) -> None:
        match command:
            case Cancel(request_id=request_id):
                self._shards.forget(request_id)
            case Drain():  # the KV owners decide how the requests end
                self._shards.lose_all("the KVP worker had to release it")

    async def run(self) -> None:
        await self._shards.run()

    async def wait_idle(self) -> None:
        await self._table.wait_idle()

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d shards: %s", len(self._table), reason)
        self._shards.lose_all(reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=0)
        self._receiver.check_integrity()
        self._shards.check_integrity()

    async def close(self) -> None:
        await self._shards.close()
        await self._receiver.close()
