"""Attaches the KV owner to the KVP workers of its requests, while a shard needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from millrace.concurrency import cancel
from millrace.core.errors import CapacityError, TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import AttachAsk
from millrace.core.kv.layout import KvLayout
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.transport.base import Transport
from millrace.wire.clients.kvp_peer import Attachment, GrpcKvpPeer, KvpPeers


@dataclass(slots=True, eq=False)
class _KvpWorker:
    """A KVP worker. `opened` is done with "" when it is attached, else with the reason why not;
    `left` when it has no user any more.
    """

    opened: asyncio.Future[str]
    task: asyncio.Task[None]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    lost: str = ""


class KvpWorkers:
    """Attaches each KVP worker from its first shard until the release of its last shard.

    The exchange identifies a KVP worker by `str` of its incarnation.
    """

    def __init__(
        self,
        exchange: KvpExchange,
        *,
        incarnation: Incarnation,
        layout: KvLayout,
        transport: Transport,
        timeout_s: float,
    ) -> None:
        """`incarnation`, `layout`, `transport`: of this instance."""
        self._exchange = exchange
        self._incarnation = incarnation
        self._layout = layout
        self._transport = transport
        self._timeout_s = timeout_s
        self._peers = KvpPeers()
        self._workers: dict[Incarnation, _KvpWorker] = {}

    @asynccontextmanager
    async def attached(self, incarnation: Incarnation, address: str) -> AsyncIterator[GrpcKvpPeer]:
        """Attaches the KVP worker; passes may send rows to it meanwhile. Raises TransferError.

        Attaches a lost one again after its other users have left.
        """
        peer = self._peers.to(address)
        while (worker := self._workers.get(incarnation)) is not None and worker.lost:
            await worker.left.wait()
        if worker is None:
            opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._stay(incarnation, peer, opened))
            worker = self._workers[incarnation] = _KvpWorker(opened, task)
        worker.users += 1
        try:
            if why := await asyncio.shield(worker.opened) or worker.lost:
                raise TransferError(why)
            yield peer
        finally:
            worker.users -= 1
            if not worker.users:
                del self._workers[incarnation]
                worker.left.set()
                worker.task.cancel()

    def lose(self, worker: str, why: str) -> None:
        """Notes that the exchange has lost a KVP worker: it has no new users until it is attached
        again.
        """
        for incarnation, one in self._workers.items():
            if str(incarnation) == worker:
                one.lost = one.lost or why

    async def close(self) -> None:
        """Detaches all KVP workers, used or not."""
        await cancel(*(worker.task for worker in self._workers.values()))
        await self._peers.close()

    async def _stay(
        self, incarnation: Incarnation, peer: GrpcKvpPeer, opened: asyncio.Future[str]
    ) -> None:
        """Stays attached until cancelled."""
        try:
            attachment = await self._attach(incarnation, peer)
        except (TransferError, CapacityError) as error:
            opened.set_result(str(error))
            return
        try:
            opened.set_result("")
            worker, why = self._workers[incarnation], await attachment.lost()
            worker.lost = why
            self._exchange.lose(str(incarnation), why)
            await asyncio.get_running_loop().create_future()
        finally:
            attachment.close()
            self._exchange.detach(str(incarnation))

    async def _attach(self, incarnation: Incarnation, peer: GrpcKvpPeer) -> Attachment:
        offer = self._exchange.offer()
        try:
            attachment = await peer.attach(
                AttachAsk(
                    owner=self._incarnation,
                    worker=incarnation,
                    layout=self._layout,
                    max_rows=self._exchange.shape.max_rows,
                    agent_metadata=self._transport.metadata(),
                    region=offer.region,
                    offset=offer.offset,
                ),
                timeout_s=self._timeout_s,
            )
        except BaseException:
            self._exchange.withdraw(offer)  # no rows were sent, so none come back
            raise
        grant = attachment.grant
        try:
            await self._exchange.attach(
                str(incarnation),
                offer,
                metadata=grant.agent_metadata,
                slot=grant.slot,
                region=grant.region,
                offset=grant.offset,
            )
        except BaseException:
            attachment.close()
            raise
        return attachment
