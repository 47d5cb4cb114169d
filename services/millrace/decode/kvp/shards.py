"""Requests whose KV is spread: the shards that others hold, from admission to release (KVP).

Each shard is a stream to its holder (`wire/kvp_peer.py`): opened when the request is admitted, it
says when the shard's part of the prompt has landed, and its end is the end of the lease, from
whichever side. A shard that is lost costs its request, and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import HoldAsk
from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.kv.transfer import Incarnation
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import KvShard
from millrace.decode.kvp.workers import Holders
from millrace.decode.request import DecodeRequest
from millrace.engine.attention.kvp_link import ExchangeLink
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_owner import Remote, reach_of
from millrace.instance.host import WorkerContext
from millrace.instance.shards.shard_host import exchange_shape
from millrace.instance.spans import span
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.transport.regions import Memory
from millrace.wire.kvp_peer import GrpcKvpPeer

log = logging.getLogger(__name__)

#: Holders of one instance's requests at once. Memory is taken for those that there are.
MOST_HOLDERS = 32


@dataclass(slots=True, eq=False)
class _Spread:
    """What others hold of one request. `landed` are the shards that have what is sent to them, by
    their number in the request."""

    request: DecodeRequest
    sent_tokens: int
    landed: dict[int, RemoteShard] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class SpreadRequests:
    """Of one instance: opens and ends shards elsewhere. For the event loop only.

    `on_landed` says that all of a request's shards have, which are `DecodeRequest.shards` then;
    `on_lost` that one of them is gone, and why. `spill_pages` are of the pool, for good: K/V of
    tokens that are a holder's lies there for as long as its layer's pass.
    """

    def __init__(
        self,
        context: WorkerContext,
        on_landed: Callable[[DecodeRequest], None],
        on_lost: Callable[[DecodeRequest, str], None],
        pass_tokens: int,
    ) -> None:
        """`pass_tokens`: of spread requests that a pass computes at most."""
        engine, transport = context.engine, context.transport
        self._life = context.incarnation
        self._layout = engine.layout
        self._on_landed = on_landed
        self._on_lost = on_lost
        self._timeout_s = context.config.transfer.handshake_timeout_s
        self._spread: dict[str, _Spread] = {}
        shape = exchange_shape(engine)
        memory = exchange_memory(KvpExchange.memory_bytes(shape, MOST_HOLDERS))
        loop = asyncio.get_running_loop()

        def told_of_loss(holder: str, why: str) -> None:
            loop.call_soon_threadsafe(self._holder_lost, holder, why)

        self._exchange = KvpExchange(
            transport,
            Memory.of_tensor(memory),
            shape,
            holders=MOST_HOLDERS,
            timeout_s=context.config.scheduler.lease_s,
            lease_s=context.config.transfer.lease_s,
            on_lost=told_of_loss,
        )
        self._holders = Holders(
            self._exchange,
            life=self._life,
            layout=engine.layout,
            metadata=transport.metadata(),
            timeout_s=self._timeout_s,
        )
        context.registry.gauge_function(
            "millrace_decode_spread_requests",
            "requests of this KV owner with KV at other instances",
            lambda: len(self._spread),
        )
        self.spill_pages = engine.pool.allocate(engine.layout.pages_for(pass_tokens))
        dtype, page_tokens = engine.pool.storage.dtype, engine.layout.page_tokens
        link = ExchangeLink(self._exchange, memory, dtype, page_tokens)
        reach = reach_of(engine.shape.sliding_windows)
        engine.runner.remote = Remote(link, self.spill_pages, reach)

    def refusal(self, spec: RequestSpec) -> str:
        """Why a request can't be spread from here; empty when it can."""
        if spec.sampling.n > 1:
            return f"{spec.sampling.n} choices can't be spread over instances"
        return ""

    def open(self, request: DecodeRequest, shards: Sequence[KvShard], sent_tokens: int) -> None:
        """`shards`: those that others hold. All of them open at once. The KV of the first
        `sent_tokens` is sent there by prefill instances, the rest by the passes from here."""
        spread = self._spread[request.id] = _Spread(request, sent_tokens)
        spread.tasks = [
            asyncio.create_task(self._keep(spread, index, shard))
            for index, shard in enumerate(shards)
        ]

    async def close(self, request: DecodeRequest) -> None:
        """Lets go of what others hold of a request, if anything. No pass may need it any more."""
        spread = self._spread.pop(request.id, None)
        if spread is not None:
            for task in spread.tasks:
                task.cancel()
            await asyncio.gather(*spread.tasks, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an instance without requests is attached anywhere."""
        self._exchange.check_integrity(idle=not self._spread)

    async def close_all(self) -> None:
        for spread in list(self._spread.values()):
            await self.close(spread.request)
        await self._holders.close()

    # -- one shard

    async def _keep(self, spread: _Spread, index: int, shard: KvShard) -> None:
        """Until cancelled; lost or not, the holder stays attached for passes that are under way."""
        holder = shard.holder.incarnation
        try:
            async with self._holders.attached(holder, shard.holder.address) as peer:
                why = await self._hold(spread, index, holder, peer, shard)
                self._lose(spread, f"a shard at {holder.id} is lost: {why}")
                await asyncio.get_running_loop().create_future()
        except TransferError as error:
            self._lose(spread, f"no shard at {holder.id}: {error}")

    async def _hold(
        self,
        spread: _Spread,
        index: int,
        holder: Incarnation,
        peer: GrpcKvpPeer,
        shard: KvShard,
    ) -> str:
        """Holds the shard until it is lost; says why."""
        try:
            ask = self._ask(spread, holder, shard)
            held = await peer.hold(ask, timeout_s=self._timeout_s)
        except TransferError as error:
            return str(error)
        try:
            await held.landed()
            landed = RemoteShard(
                holder=str(holder),
                shard=held.number,
                start_token=shard.start_token,
                end_token=shard.end_token,
            )
            self._landed(spread, index, landed)
            return await held.lost()
        except TransferError as error:
            return str(error)
        finally:
            held.close()

    def _ask(self, spread: _Spread, holder: Incarnation, shard: KvShard) -> HoldAsk:
        return HoldAsk(
            request_id=spread.request.id,
            attempt=spread.request.attempt,
            owner=self._life,
            holder=holder,
            layout=self._layout,
            start_token=shard.start_token,
            end_token=shard.end_token,
            prompt_tokens=spread.sent_tokens,
        )

    def _landed(self, spread: _Spread, number: int, landed: RemoteShard) -> None:
        spread.landed[number] = landed
        if len(spread.landed) == len(spread.tasks):
            request = spread.request
            request.shards = tuple(shard for _, shard in sorted(spread.landed.items()))
            request.spans.append(
                span(
                    "kvp_shards",
                    self._life.id,
                    request.admitted_s,
                    request.clock.now_s(),
                    instances=1 + len(request.shards),
                )
            )
            self._on_landed(request)

    def _lose(self, spread: _Spread, why: str) -> None:
        if self._spread.get(spread.request.id) is spread:
            self._on_lost(spread.request, why)

    def _holder_lost(self, holder: str, why: str) -> None:
        """A pass, or the transport, has found that a holder is gone."""
        for spread in list(self._spread.values()):
            if any(shard.holder == holder for shard in spread.landed.values()):
                self._lose(spread, why)
