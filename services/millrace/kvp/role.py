"""The KVP worker: pages for shards of long requests, and attention over them; no model beside."""

from __future__ import annotations

import logging

import grpc

from millrace.engine.assembly import KvMemory
from millrace.instance.host import HostContext
from millrace.instance.shards.kvp_servicer import KvpServicer
from millrace.instance.shards.shard_host import ShardHost
from millrace.instance.shards.shard_table import NOBODY, ShardBook
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.wire.pb import scheduler_pb2

log = logging.getLogger(__name__)


class KvpRole:
    """All that it holds are shards: their requests are at home elsewhere."""

    name = "kvp"

    def __init__(self, context: HostContext, memory: KvMemory) -> None:
        self._pool = memory.pool
        self._book = ShardBook()
        self._receiver = ReceiveManager(
            transport=context.transport,
            layout=memory.layout,
            storage=memory.storage,
            identity=(context.incarnation.id, context.incarnation.generation),
            config=context.config.transfer,
            callbacks=self._book.beside(NOBODY),
        )
        self._shards = ShardHost(context, memory, self._book, self._receiver)

    @property
    def kv_region(self) -> int:
        return self._receiver.region

    def attach(self, server: grpc.aio.Server) -> None:
        KvReceiverServicer(self._receiver).add_to(server)
        KvpServicer(self._shards).add_to(server)

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        register.role = self.name

    def counts(self) -> tuple[int, int]:
        return self._book.counts()

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        running, waiting = self.counts()
        return scheduler_pb2.Heartbeat(
            free_pages=self._pool.free_pages, running=running, waiting=waiting
        )

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "cancel":
            self._shards.forget(command.cancel.request_id)
        elif kind == "drain":  # how their requests end is for their homes to decide
            self._shards.lose_all("its holder had to let go of it")

    async def run(self) -> None:
        await self._shards.run()

    async def wait_idle(self) -> None:
        await self._book.wait_idle()

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d shards: %s", len(self._book), reason)
        self._shards.lose_all(reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=0)
        self._receiver.check_integrity()
        self._shards.check_integrity()

    async def close(self) -> None:
        await self._shards.close()
        await self._receiver.close()
