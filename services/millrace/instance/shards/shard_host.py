"""Holds shards of other instances' long requests: pages, KV, and attention over them (KVP).

The KV owner's streams are the leases (`kvp_servicer.py`): a shard lasts as long as its Hold stream,
an owner's attachment to the server as long as its Attach stream. The pages of an ended shard are
freed when no write can reach them any more; then its release is reported to the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.core.scheduler.reports import RequestReleased
from millrace.engine.assembly import KvMemory
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_worker import ShardAttention
from millrace.engine.parallel.shard_ranks import MemberShards
from millrace.instance.role import HostContext
from millrace.instance.shards.shard_metrics import ShardMetrics, TimedShards
from millrace.instance.shards.shard_table import HeldShard, ShardTable
from millrace.instance.tasks import Tasks
from millrace.telemetry.tracing.stopwatch import Stopwatch
from millrace.transfer.kvp.server import KvpServer, ShardCompute
from millrace.transfer.push.handshake import stale_receiver
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.transport.layout import mismatch
from millrace.transfer.transport.regions import Memory

log = logging.getLogger(__name__)

MAX_ROWS: Final = 128
"""Rows per piece of a pass, equal at KV owners and KVP workers. A larger pass is sent in pieces."""

OWNERS: Final = 32
"""KV owners that one KVP worker serves at a time. Only attached owners take memory."""


@dataclass(slots=True, eq=False)
class _Owner:
    """An attached KV owner. `slot`: at the server; 0: not yet."""

    slot: int = 0


def exchange_shape(memory: KvMemory) -> ExchangeShape:
    """Returns the shape of the data between KV owners and KVP workers of this model."""
    return ExchangeShape(
        num_q_heads=memory.shape.num_heads,
        num_kv_heads=memory.shape.num_kv_heads,
        head_dim=memory.shape.head_dim,
        element_bytes=memory.layout.element_bytes,
        max_rows=MAX_ROWS,
    )


class ShardHost:
    """The KVP worker's shards and attached KV owners. For the event loop only.

    The pool of `memory` may have other users, too.
    """

    def __init__(
        self, context: HostContext, memory: KvMemory, table: ShardTable, receiver: ReceiveManager
    ) -> None:
        self._life = context.incarnation
        self._layout = memory.layout
        self._pool = memory.pool
        self._table = table
        self._receiver = receiver
        self._send = context.send
        self._tracer = context.tracer
        self._metrics = ShardMetrics(context.registry, table)
        shape = exchange_shape(memory)
        nbytes = KvpServer.memory_bytes(shape, OWNERS)
        backend = context.config.engine.attention_backend
        attention, exchanged = _attention(memory, shape, nbytes, backend)
        self._server = KvpServer(
            context.transport,
            Memory.of_tensor(exchanged),
            shape,
            TimedShards(attention, self._metrics.layer_s.observe),
            owners=OWNERS,
            lease_s=context.config.transfer.lease_s,
        )
        self._transport = context.transport
        self._owners: dict[Incarnation, _Owner] = {}
        self._tasks = Tasks()

    async def run(self) -> None:
        """Runs until cancelled; raises the error of a failed background task."""
        await self._tasks.watch()

    # -- owners

    async def attach(self, ask: AttachAsk) -> AttachGrant:
        """Attaches a KV owner. Raises TransferError, and CapacityError when there is no room.

        An owner attaches again after it has ended its attachment, and this may be heard before the
        end: then the earlier attachment ends now.
        """
        self._check_meant(ask)
        if ask.max_rows != MAX_ROWS:
            raise TransferError(
                f"max_rows of {ask.owner} is {ask.max_rows}; it must be {MAX_ROWS}, as here"
            )
        if (before := self._owners.get(ask.owner)) is not None:
            self.detach(ask.owner, before.slot)
        owner = self._owners[ask.owner] = _Owner()
        try:
            attachment = await self._server.attach(
                metadata=ask.agent_metadata, region=ask.region, offset=ask.offset
            )
        except BaseException:
            if self._owners.get(ask.owner) is owner:
                del self._owners[ask.owner]
            raise
        owner.slot = attachment.slot
        if self._owners.get(ask.owner) is not owner:
            self._server.detach(owner.slot)
            raise TransferError(f"{ask.owner} has attached again meanwhile")
        return AttachGrant(
            slot=attachment.slot,
            agent_metadata=self._transport.metadata(),
            region=attachment.region,
            offset=attachment.offset,
        )

    def detach(self, owner: Incarnation, slot: int) -> None:
        """Ends the attachment of a KV owner that has this slot, and releases the owner's shards.
        Does nothing after the owner has attached again.
        """
        attached = self._owners.get(owner)
        if attached is None or attached.slot != slot:
            return
        del self._owners[owner]
        for shard in self._table.of(owner):
            self.let_go(shard)
        if slot:
            self._server.detach(slot)

    # -- shards

    def hold(self, ask: HoldAsk) -> HeldShard:
        """Takes pages for a shard. Raises TransferError, and CapacityError when there are none."""
        self._check_meant(ask)
        if ask.owner not in self._owners:
            raise TransferError(f"{ask.owner} asks for a shard but is not attached")
        if self._table.get(ask.request_id) is not None:
            raise TransferError(f"request {ask.request_id} has a shard here already")
        pages = self._pool.allocate(self._layout.pages_for(ask.num_tokens))
        try:
            if ask.landing_tokens:
                self._receive(ask, pages[: self._layout.pages_for(ask.landing_tokens)])
        except TransferError:
            self._pool.free(pages)
            raise
        number = self._server.open_shard(pages, ask.start_token, ask.end_token)
        scope = self._tracer.scope(ask.traceparent, ask.arrival_unix_s)
        held_s = Stopwatch(ask.arrival_unix_s).now_s()
        shard = HeldShard(ask, pages, number, scope=scope, held_s=held_s)
        if not ask.landing_tokens:
            shard.land()  # it has no tokens of the prompt
        self._table.add(shard)
        return shard

    def _receive(self, ask: HoldAsk, pages: list[int]) -> None:
        span = (ask.start_token, ask.start_token + ask.landing_tokens)
        self._receiver.admit(ask.request_id, pages, ask.prompt_tokens, ask.attempt, shard=span)

    async def landed(self, shard: HeldShard) -> bool:
        """Waits for the shard's share of the prompt; returns False when the shard is lost first."""
        await asyncio.wait((shard.landed, shard.lost), return_when=asyncio.FIRST_COMPLETED)
        if shard.lost.done():
            return False
        self._server.landed(shard.number, shard.ask.start_token + shard.ask.landing_tokens)
        return True

    def let_go(self, shard: HeldShard) -> None:
        """Releases a shard in the background; a second call does nothing."""
        if not shard.ended:
            shard.ended = True
            _trace(shard)
            shard.lose("it was released")
            self._tasks.spawn(self._release(shard))

    async def _release(self, shard: HeldShard) -> None:
        await asyncio.wrap_future(self._server.close_shard(shard.number))
        await self._receiver.release(shard.ask.request_id)
        self._pool.free(shard.pages)
        self._table.remove(shard)
        self._send(RequestReleased(request_id=shard.ask.request_id, attempt=shard.ask.attempt))

    # -- for the role

    def forget(self, request_id: str) -> None:
        """Drops a cancelled request's shard, if any, and reports the release to the scheduler."""
        if (shard := self._table.get(request_id)) is None:
            self._send(RequestReleased(request_id=request_id))
        else:
            self.lose(shard, "the scheduler has cancelled it")

    def lose(self, shard: HeldShard, why: str) -> None:
        """Reports to the KV owner that its shard is lost, and releases the shard."""
        if not shard.ended:
            log.warning("request %s: its shard is given up: %s", shard.ask.request_id, why)
            self._metrics.lost.inc()
        shard.lose(why)
        self.let_go(shard)

    def lose_all(self, why: str) -> None:
        for shard in self._table:
            self.lose(shard, why)

    def check_integrity(self) -> None:
        """Raises IntegrityError when no KV owner is attached but the server holds state."""
        self._server.check_integrity(idle=not self._owners)

    async def close(self) -> None:
        """Ends all work, finished or not. Must be called before the transport is closed."""
        await self._tasks.cancel()
        await asyncio.to_thread(self._server.close)

    def _check_meant(self, ask: AttachAsk | HoldAsk) -> None:
        """Raises TransferError when a message is for another incarnation or another KV layout."""
        if stale := stale_receiver(ask.worker, self._life):
            raise TransferError(stale)
        if differs := mismatch(ask.layout, self._layout):
            raise TransferError(differs)


def _trace(shard: HeldShard) -> None:
    """Records the time for which a shard was held."""
    if shard.scope.records:
        ask = shard.ask
        named: dict[str, str | int] = {
            "millrace.request_id": ask.request_id,
            "millrace.start_token": ask.start_token,
            "millrace.end_token": ask.end_token,
        }
        shard.scope.end("shard", shard.held_s, Stopwatch(ask.arrival_unix_s).now_s(), named)


def _attention(
    memory: KvMemory, shape: ExchangeShape, nbytes: int, backend: str
) -> tuple[ShardCompute, Tensor]:
    """Returns the attention over all members' pools, and the exchange's memory."""
    windows = memory.shape.sliding_windows
    if memory.members is not None:
        others = memory.members.shards
        shards = MemberShards(memory.storage, shape, nbytes, windows, backend, others)
        return shards, shards.memory
    exchanged = exchange_memory(nbytes)
    return ShardAttention(memory.storage, shape, exchanged, windows, backend), exchanged
