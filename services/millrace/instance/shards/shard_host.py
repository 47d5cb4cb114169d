"""Holding shards of others' long requests: pages, their KV, attention over them (KVP).

The owner's streams are the leases (`kvp_servicer.py`): a shard lasts as long as its Hold stream, an
owner's place at the desk as long as its Attach stream. What ends is freed once no write can reach
it any more, and then the scheduler is told.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.core.kv.transfer import Incarnation
from millrace.core.scheduler.reports import RequestReleased
from millrace.engine.assembly import KvMemory
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_worker import ShardAttention
from millrace.instance.host import HostContext
from millrace.instance.shards.shard_metrics import ShardMetrics, TimedShards
from millrace.instance.shards.shard_table import HeldShard, ShardBook
from millrace.instance.tasks import Tasks
from millrace.transfer.kvp.server import KvpServer
from millrace.transfer.push.handshake import stale_receiver
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.transport.layout import mismatch
from millrace.transfer.transport.regions import Memory

log = logging.getLogger(__name__)

MAX_ROWS: Final = 128
"""Rows of a piece of a pass, at owners and holders alike. A pass with more goes in pieces."""

OWNERS: Final = 32
"""That one holder serves at once. Memory is taken for those that come."""


def exchange_shape(memory: KvMemory) -> ExchangeShape:
    """Of what travels between owners and holders of this model."""
    return ExchangeShape(
        num_q_heads=memory.shape.num_heads,
        num_kv_heads=memory.shape.num_kv_heads,
        head_dim=memory.shape.head_dim,
        element_bytes=memory.layout.element_bytes,
        max_rows=MAX_ROWS,
    )


class ShardHost:
    """For the event loop only. The pool of `memory` may have other users beside it."""

    def __init__(
        self, context: HostContext, memory: KvMemory, book: ShardBook, receiver: ReceiveManager
    ) -> None:
        self._life = context.incarnation
        self._layout = memory.layout
        self._pool = memory.pool
        self._book = book
        self._receiver = receiver
        self._send = context.send
        self._metrics = ShardMetrics(context.registry, book)
        shape = exchange_shape(memory)
        exchanged = exchange_memory(KvpServer.memory_bytes(shape, OWNERS))
        attention = ShardAttention(
            memory.storage,
            shape,
            exchanged,
            memory.shape.sliding_windows,
            context.config.engine.attention_backend,
        )
        self._desk = KvpServer(
            context.transport,
            Memory.of_tensor(exchanged),
            shape,
            TimedShards(attention, self._metrics.layer_s.observe),
            owners=OWNERS,
            lease_s=context.config.transfer.lease_s,
        )
        self._metadata = context.transport.metadata()
        self._owners: dict[Incarnation, int] = {}  # life -> slot at the desk; 0: not yet
        self._tasks = Tasks()

    async def run(self) -> None:
        """Until cancelled; raises what went wrong in the background."""
        await self._tasks.watch()

    # -- owners

    async def attach(self, ask: AttachAsk) -> AttachGrant:
        """Makes room for an owner. Raises TransferError, and CapacityError when there is none."""
        self._check_meant(ask)
        if ask.max_rows != MAX_ROWS:
            raise TransferError(f"a piece has {ask.max_rows} rows there, and {MAX_ROWS} here")
        if ask.owner in self._owners:
            raise TransferError(f"{ask.owner} is attached already")
        self._owners[ask.owner] = 0
        try:
            seat = await self._desk.attach(
                metadata=ask.agent_metadata, region=ask.region, offset=ask.offset
            )
        except BaseException:
            del self._owners[ask.owner]
            raise
        self._owners[ask.owner] = seat.slot
        return AttachGrant(
            slot=seat.slot,
            agent_metadata=self._metadata,
            region=seat.region,
            offset=seat.offset,
        )

    def detach(self, owner: Incarnation) -> None:
        """The owner is gone, and its shards with it."""
        for shard in self._book.of(owner):
            self.let_go(shard)
        self._desk.detach(self._owners.pop(owner))

    # -- shards

    def hold(self, ask: HoldAsk) -> HeldShard:
        """Takes pages for a shard. Raises TransferError, and CapacityError when there are none."""
        self._check_meant(ask)
        if ask.owner not in self._owners:
            raise TransferError(f"{ask.owner} wants a shard held without being attached")
        if self._book.get(ask.request_id) is not None:
            raise TransferError(f"request {ask.request_id} has a shard here already")
        pages = self._pool.allocate(self._layout.pages_for(ask.num_tokens))
        try:
            if ask.landing_tokens:
                self._receive(ask, pages[: self._layout.pages_for(ask.landing_tokens)])
        except TransferError:
            self._pool.free(pages)
            raise
        number = self._desk.open_shard(pages, ask.start_token, ask.end_token)
        shard = HeldShard(ask, pages, number)
        if not ask.landing_tokens:
            shard.land()  # it begins with what is generated
        self._book.add(shard)
        return shard

    def _receive(self, ask: HoldAsk, pages: list[int]) -> None:
        span = (ask.start_token, ask.start_token + ask.landing_tokens)
        self._receiver.admit(ask.request_id, pages, ask.prompt_tokens, ask.attempt, shard=span)

    async def landed(self, shard: HeldShard) -> bool:
        """Waits for its part of the prompt; False when it was lost before that came."""
        await asyncio.wait((shard.landed, shard.lost), return_when=asyncio.FIRST_COMPLETED)
        if shard.lost.done():
            return False
        self._desk.landed(shard.number, shard.ask.start_token + shard.ask.landing_tokens)
        return True

    def let_go(self, shard: HeldShard) -> None:
        """Frees it in the background; harmless when that is under way."""
        if not shard.ended:
            shard.ended = True
            shard.lose("it was let go of")
            self._tasks.spawn(self._release(shard))

    async def _release(self, shard: HeldShard) -> None:
        await asyncio.wrap_future(self._desk.close_shard(shard.number))
        await self._receiver.release(shard.ask.request_id)
        self._pool.free(shard.pages)
        self._book.remove(shard)
        self._send(RequestReleased(request_id=shard.ask.request_id, attempt=shard.ask.attempt))

    # -- for the role

    def forget(self, request_id: str) -> None:
        """The scheduler wants nothing of a request here: it is told when that is the case."""
        if (shard := self._book.get(request_id)) is None:
            self._send(RequestReleased(request_id=request_id))
        else:
            self.lose(shard, "the scheduler has cancelled it")

    def lose(self, shard: HeldShard, why: str) -> None:
        """Tells the owner that its shard goes, and lets go of it."""
        if not shard.ended:
            log.warning("request %s: its shard is given up: %s", shard.ask.request_id, why)
            self._metrics.lost.inc()
        shard.lose(why)
        self.let_go(shard)

    def lose_all(self, why: str) -> None:
        for shard in self._book:
            self.lose(shard, why)

    def check_integrity(self) -> None:
        """Raises IntegrityError for what an instance that holds no shard must not have."""
        self._desk.check_integrity(idle=not self._owners)

    async def close(self) -> None:
        """Ends all work, done or not; before the transport is closed."""
        await self._tasks.cancel()
        await asyncio.to_thread(self._desk.close)

    def _check_meant(self, ask: AttachAsk | HoldAsk) -> None:
        """Raises TransferError when an ask is not for this life, or not of its model's KV."""
        if stale := stale_receiver(ask.holder, self._life):
            raise TransferError(stale)
        if differs := mismatch(ask.layout, self._layout):
            raise TransferError(differs)
