"""Opens and ends the shards that KVP workers hold for spread requests, at the KV owner.

Each shard is a stream to its KVP worker (`wire.clients.kvp_peer`). The stream opens when the
request is admitted and reports when the shard's share of the prompt has landed. When either side
ends the stream, the lease ends. A lost shard fails only its own request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.concurrency import cancel
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import HoldAsk
from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import KvShard
from millrace.decode.kvp.workers import KvpWorkers
from millrace.decode.request import DecodeRequest
from millrace.engine.attention.kvp_link import ExchangeLink
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_owner import Remote, reach_of
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_host import exchange_shape
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.transport.regions import Memory
from millrace.wire.clients.kvp_peer import GrpcKvpPeer

log = logging.getLogger(__name__)

#: KVP workers of one instance's requests at a time. Only attached workers take memory.
MOST_KVP_WORKERS = 32


@dataclass(slots=True, eq=False)
class _Spread:
    """The shards of one request at KVP workers, which are named. `landed`: the shards whose KV of
    the prompt has landed, by their number in the request."""

    request: DecodeRequest
    sent_tokens: int
    workers: frozenset[str]
    landed: dict[int, RemoteShard] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class SpreadRequests:
    """Opens and ends the shards of one KV owner's requests. For the event loop only.

    `on_landed` is called when all of a request's shards have landed and are in
    `DecodeRequest.shards`; `on_lost` when a shard is lost, with the reason. `spill_pages` are taken
    from the pool until the process ends: they hold K/V of tokens of a KVP worker during a layer.
    """

    def __init__(
        self,
        context: WorkerContext,
        on_landed: Callable[[DecodeRequest], None],
        on_lost: Callable[[DecodeRequest, str], None],
        pass_tokens: int,
    ) -> None:
        """`pass_tokens`: most tokens of spread requests that a pass computes."""
        engine, transport = context.engine, context.transport
        self._incarnation = context.incarnation
        self._layout = engine.layout
        self._on_landed = on_landed
        self._on_lost = on_lost
        self._timeout_s = context.config.transfer.handshake_timeout_s
        self._spread: dict[str, _Spread] = {}
        shape = exchange_shape(engine)
        memory = exchange_memory(KvpExchange.memory_bytes(shape, MOST_KVP_WORKERS))
        loop = asyncio.get_running_loop()

        def report_loss(worker: str, why: str) -> None:
            loop.call_soon_threadsafe(self._worker_lost, worker, why)

        self._exchange = KvpExchange(
            transport,
            Memory.of_tensor(memory),
            shape,
            workers=MOST_KVP_WORKERS,
            timeout_s=context.config.scheduler.lease_s,
            lease_s=context.config.transfer.lease_s,
            on_lost=report_loss,
        )
        self._workers = KvpWorkers(
            self._exchange,
            incarnation=self._incarnation,
            layout=engine.layout,
            transport=transport,
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
        """Returns why the request can't be spread; empty when it can."""
        if spec.sampling.n > 1:
            return f"{spec.sampling.n} choices can't be spread over instances"
        return ""

    def open(self, request: DecodeRequest, shards: Sequence[KvShard], sent_tokens: int) -> None:
        """Opens `shards`, those of KVP workers, all at once. Prefill instances send the KV of the
        first `sent_tokens` tokens to them; passes of this instance send the rest."""
        request.num_shards = len(shards)
        spread = self._spread[request.id] = _Spread(
            request, sent_tokens, frozenset(str(shard.worker.incarnation) for shard in shards)
        )
        spread.tasks = [
            asyncio.create_task(self._keep(spread, index, shard))
            for index, shard in enumerate(shards)
        ]

    async def close(self, request: DecodeRequest) -> None:
        """Releases the request's shards, if any. No pass may need them any more."""
        spread = self._spread.pop(request.id, None)
        if spread is not None:
            await cancel(*spread.tasks)

    def check_integrity(self) -> None:
        """Raises IntegrityError when no request is spread but a KVP worker is attached."""
        self._exchange.check_integrity(idle=not self._spread)

    async def close_all(self) -> None:
        for spread in list(self._spread.values()):
            await self.close(spread.request)
        await self._workers.close()

    # -- one shard

    async def _keep(self, spread: _Spread, index: int, shard: KvShard) -> None:
        """Keeps the KVP worker attached until cancelled, for passes in flight even after a loss."""
        worker = shard.worker.incarnation
        try:
            async with self._workers.attached(worker, shard.worker.address) as peer:
                why = await self._hold(spread, index, worker, peer, shard)
                self._lose(spread, f"a shard at {worker.id} is lost: {why}")
                await asyncio.get_running_loop().create_future()
        except TransferError as error:
            self._lose(spread, f"no shard at {worker.id}: {error}")

    async def _hold(
        self,
        spread: _Spread,
        index: int,
        worker: Incarnation,
        peer: GrpcKvpPeer,
        shard: KvShard,
    ) -> str:
        """Holds the shard until it is lost; returns the reason."""
        try:
            ask = self._ask(spread, worker, shard)
            held = await peer.hold(ask, timeout_s=self._timeout_s)
        except TransferError as error:
            return str(error)
        try:
            await held.landed()
            landed = RemoteShard(
                worker=str(worker),
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

    def _ask(self, spread: _Spread, worker: Incarnation, shard: KvShard) -> HoldAsk:
        return HoldAsk(
            request_id=spread.request.id,
            attempt=spread.request.attempt,
            owner=self._incarnation,
            worker=worker,
            layout=self._layout,
            start_token=shard.start_token,
            end_token=shard.end_token,
            prompt_tokens=spread.sent_tokens,
            traceparent=spread.request.spec.traceparent,
            arrival_unix_s=spread.request.spec.arrival_unix_s,
        )

    def _landed(self, spread: _Spread, number: int, landed: RemoteShard) -> None:
        spread.landed[number] = landed
        if len(spread.landed) == len(spread.tasks):
            request = spread.request
            request.shards = tuple(shard for _, shard in sorted(spread.landed.items()))
            request.trace.add(
                "kvp_shards",
                request.admitted_s,
                request.clock.now_s(),
                instances=1 + len(request.shards),
            )
            self._on_landed(request)

    def _lose(self, spread: _Spread, why: str) -> None:
        if self._spread.get(spread.request.id) is spread:
            self._on_lost(spread.request, why)

    def _worker_lost(self, worker: str, why: str) -> None:
        """Fails the requests with a shard at a KVP worker that a pass or the transport lost, landed
        or not: the exchange with this worker begins again once all of them have left.
        """
        self._workers.lose(worker, why)
        for spread in list(self._spread.values()):
            if worker in spread.workers:
                self._lose(spread, why)
