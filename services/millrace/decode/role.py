"""The part of an instance's role that decode and mixed instances share: they emit tokens."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import grpc

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.scheduler.commands import Drain
from millrace.core.scheduler.reports import CachedBlocks, Heartbeat, Registration
from millrace.decode.kvp.shards import SpreadRequests
from millrace.decode.output.output import Output
from millrace.decode.pace import TokenPace
from millrace.decode.request_table import RequestTable
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.instance.prefix import cached_blocks
from millrace.instance.role import WorkerContext
from millrace.instance.shards.kvp_servicer import KvpServicer
from millrace.instance.shards.shard_host import ShardHost
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.tasks import Tasks
from millrace.instance.tokens.servicer import TokenServicer
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.receive.manager import ReceiveManager

log = logging.getLogger(__name__)


class TokenRole:
    """Holds requests until their last token, and shards of other instances' requests.

    `table` has every request that the instance holds. A subclass computes: it has a `name`, and
    adds to `run`, `check_integrity` and `close`.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        table: RequestTable,
        output: Output,
        hosted: ShardTable,
        receiver: ReceiveManager,
        spread: SpreadRequests,
        prefix_cache: PrefixCache,
        tasks: Tasks,
    ) -> None:
        """`hosted`: shards of other instances' requests, whose KV `receiver` takes."""
        self.prefix_cache = prefix_cache
        self._context = context
        self._pool = context.engine.pool
        self.table = table
        self._output = output
        self.hosted = hosted
        self._receiver = receiver
        self._spread = spread
        self._tasks = tasks
        self._host = ShardHost(context, context.engine, hosted, receiver)
        self._pace = TokenPace()

    @property
    def kv_region(self) -> int:
        return self._receiver.region

    @property
    def num_spill_pages(self) -> int:
        """Pages of the pool that the instance reserves for itself, not for requests."""
        return len(self._spread.spill_pages)

    @property
    def free_pages(self) -> int:
        """Pages that new requests may take."""
        return self._pool.free_pages

    def attach(self, server: grpc.aio.Server) -> None:
        TokenServicer(self._output.streams, self._context.incarnation).add_to(server)
        KvReceiverServicer(self._receiver).add_to(server)
        KvpServicer(self._host).add_to(server)

    def registration(self, base: Registration, step: DecodeStepTime | None) -> Registration:
        """Returns `base` with what the instance can hold, and the time of its decode steps."""
        self.prefix_cache.report_all()
        return replace(
            base,
            kv_pages=base.kv_pages - self.num_spill_pages,
            max_batch=self._context.config.engine.max_batch,
            decode_step=step,
            block_tokens=self.prefix_cache.block_tokens,
        )

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""
        return self.table.counts()

    def heartbeat(self) -> Heartbeat:
        (running, waiting), tbt_s = self.counts(), self._pace.take_s()
        return Heartbeat(
            free_pages=self.free_pages,
            running=running,
            waiting=waiting,
            tbt_s=tbt_s,
        )

    def cached_blocks(self) -> CachedBlocks | None:
        return cached_blocks(self.prefix_cache)

    def cancel(self, request_id: str) -> None:
        """Ends a request, or a shard of another instance's request."""
        if (request := self.table.get(request_id)) is not None:
            self._output.cancel(request)
        else:
            self._host.forget(request_id)

    def drain(self, command: Drain) -> None:
        """Gives up all requests and shards; other instances take the requests over."""
        self._output.evict(abort=command.abort)
        self._host.lose_all("the KVP worker had to release it")

    async def run(self) -> None:
        self._tasks.spawn(self._host.run())
        self._tasks.spawn(self._output.journal.run())
        await self._tasks.watch()

    async def wait_idle(self) -> None:
        while len(self.table) or len(self.hosted):
            await asyncio.gather(self.table.wait_idle(), self.hosted.wait_idle())

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d requests: %s", len(self.table), reason)
        for request in self.table:
            self._output.move(request)
        self._host.lose_all(reason)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=self.num_spill_pages)
        self.prefix_cache.check_integrity()
        self._receiver.check_integrity()
        self._spread.check_integrity()
        self._host.check_integrity()

    async def close(self) -> None:
        """Ends all that a computation could still use; call it after the computation's end."""
        await self._output.journal.flush()
        await self._spread.close_all()
        await self._host.close()
        await self._receiver.close()
