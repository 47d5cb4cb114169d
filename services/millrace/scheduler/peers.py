"""The scheduler's ends of its peers' streams."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.core.scheduler.events import InstanceJoined, InstanceLeft
from millrace.wire.pb import scheduler_pb2

#: Messages that may wait for one peer. A peer that is further behind is cut off: its stream's end
#: frees what it held, while an unbounded queue would only hide that it is stuck.
MAX_OUTBOUND = 16_384

M = TypeVar("M")


class Outbox(Generic[M]):
    """A bounded queue of messages to one peer, whose end ends the stream."""

    def __init__(self, limit: int = MAX_OUTBOUND) -> None:
        self._limit = limit
        self._messages: deque[M] = deque()
        self._wake = asyncio.Event()
        self.closed = False
        self.failure = ""  # why the stream ends; empty: it simply does

    def put(self, message: M) -> None:
        """Queues a message; a full outbox closes instead. After the close it does nothing."""
        if self.closed:
            return
        if len(self._messages) >= self._limit:
            self.close(f"{self._limit} messages wait to be read")
            return
        self._messages.append(message)
        self._wake.set()

    def close(self, failure: str = "") -> None:
        """Ends the stream: after what is queued, or at once when there is a failure to tell."""
        if self.closed:
            return
        self.closed = True
        self.failure = failure
        if failure:
            self._messages.clear()
        self._wake.set()

    async def take(self) -> list[M]:
        """All that is queued, at least one message; nothing once closed and empty."""
        while not self._messages and not self.closed:
            self._wake.clear()
            await self._wake.wait()
        messages = list(self._messages)
        self._messages.clear()
        return messages


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One registered life of a prefill or decode instance."""

    card: InstanceJoined
    register: scheduler_pb2.Register
    seen_s: float
    outbox: Outbox[scheduler_pb2.WorkerCommand] = field(default_factory=Outbox)
    sequence: int = 0

    @property
    def id(self) -> str:
        return self.card.instance_id

    def left(self) -> InstanceLeft:
        """What the core hears when this life is over."""
        return InstanceLeft(instance_id=self.id, generation=self.card.generation)

    def send(self, command: scheduler_pb2.WorkerCommand) -> None:
        """Numbers and queues a command."""
        self.sequence += 1
        command.sequence = self.sequence
        self.outbox.put(command)


@dataclass(slots=True, kw_only=True, eq=False)
class Proxy:
    """One connection of a proxy. `key` differs from one connection to the next."""

    key: str
    parked_requests: int = 0  # as it last said
    outbox: Outbox[scheduler_pb2.ProxyUpdate] = field(default_factory=Outbox)
