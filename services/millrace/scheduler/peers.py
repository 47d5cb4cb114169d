"""The scheduler's ends of the streams to its peers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.core.scheduler.events import InstanceJoined, InstanceLeft
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.wire.fleet_messages import Fleet, ProxyUpdate, WorkerCommand

#: The most messages that wait for one peer. The stream of a slower peer is ended, which frees all
#: its resources; an unbounded queue would only hide that the peer is stuck.
MAX_OUTBOUND = 16_384

M = TypeVar("M")


class Outbox(Generic[M]):
    """Queues up to `limit` messages to one peer; the end of the queue ends the stream."""

    def __init__(self, limit: int = MAX_OUTBOUND) -> None:
        self._limit = limit
        self._messages: deque[M] = deque()
        self._wake = asyncio.Event()
        self.closed = False
        self.failure = ""  # why the stream ends; empty: no failure

    def put(self, message: M) -> None:
        """Queues a message, or closes a full outbox. Does nothing after the close."""
        if self.closed:
            return
        if len(self._messages) >= self._limit:
            self.close(f"{self._limit} messages wait to be read")
            return
        self._messages.append(message)
        self._wake.set()

    def close(self, failure: str = "") -> None:
        """Ends the stream: after the queued messages, or at once with a failure."""
        if self.closed:
            return
        self.closed = True
        self.failure = failure
        if failure:
            self._messages.clear()
        self._wake.set()

    async def take(self) -> list[M]:
        """Returns all queued messages, at least one; none once the outbox is closed and empty."""
        while not self._messages and not self.closed:
            self._wake.clear()
            await self._wake.wait()
        messages = list(self._messages)
        self._messages.clear()
        return messages


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One registered incarnation of an instance."""

    card: InstanceJoined
    address: str  # host:port of its gRPC server
    seen_s: float
    outbox: Outbox[WorkerCommand] = field(default_factory=Outbox)

    @property
    def id(self) -> str:
        return self.card.instance_id

    @property
    def member(self) -> Member:
        incarnation = Incarnation(self.card.instance_id, self.card.generation)
        return Member(incarnation=incarnation, address=self.address)

    def left(self, *, silent: bool = False) -> InstanceLeft:
        """Returns the event that reports this incarnation's end to the core."""
        generation = self.card.generation
        return InstanceLeft(instance_id=self.id, generation=generation, silent=silent)


@dataclass(slots=True, kw_only=True, eq=False)
class Proxy:
    """One connection of a proxy. Every connection has another `key`: ID#NUMBER."""

    key: str
    parked_requests: int = 0  # in the proxy's last report
    outbox: Outbox[ProxyUpdate] = field(default_factory=Outbox)

    @property
    def id(self) -> str:
        return self.key.rpartition("#")[0]


def fleet(cluster: Cluster, workers: Iterable[Worker], lease: str) -> Fleet:
    """Describes the fleet to proxies.

    Draining instances are listed, too: their streams must stay open to the end.
    """
    known = list(workers)
    return Fleet(
        decode=tuple(one.member for one in known if one.card.role in ("decode", "mixed")),
        ready=bool(cluster.ready_pools()),
        prefill=tuple(one.member for one in known if one.card.role == "prefill"),
        lease=lease,
    )
