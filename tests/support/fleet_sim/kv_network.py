"""The transport of KV in the simulation: writes and notifications wait until an action delivers
them. The bytes are real: a write copies them when it is delivered.

A notification is taken on its receiver's transport thread, which works on while the event loop is
late, and not while the process stands still. What a dead process has sent is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import Handler, PeerLostError
from millrace.transfer.transport.regions import Memory, copy_on_host
from millrace.transfer.transport.runs import Runs
from support.fleet_sim.processes import Process


@dataclass(slots=True, eq=False)
class Posted:
    """A write with its notification, or a notification alone."""

    future: Future[None]
    payload: bytes
    runs: Runs | None = None
    region: int = 0
    peer_region: int = 0


class KvWire:
    """All that one process sends to another, in order."""

    def __init__(self, sender: SimTransport, receiver: SimTransport) -> None:
        self.name = f"{sender.process.name}>{receiver.process.name} kv"
        self.sender, self.receiver = sender, receiver
        self.reader = receiver.process
        self.flight: deque[Posted] = deque()

    def post(self, posted: Posted) -> None:
        self.flight.append(posted)
        self._begin()

    def _begin(self) -> None:
        """The first of them is on its way, and can't be cancelled any more."""
        while self.flight:
            future = self.flight[0].future
            if future.running() or future.set_running_or_notify_cancel():
                return
            self.flight.popleft()

    def deliver(self, most: int) -> None:
        while self.flight and most:
            most -= 1
            self._deliver(self.flight.popleft())
            self._begin()

    def _deliver(self, posted: Posted) -> None:
        try:
            if posted.runs is not None:
                source = self.sender.regions[posted.region]
                target = self.receiver.regions[posted.peer_region]
                copy_on_host(source, target, posted.runs)
                if not self.reader.has_lost:
                    self.receiver.on_written(target, posted.runs)
        except (IndexError, ValueError) as error:
            wrong = TransferError(f"write to {self.receiver.name}: {error}")
            _run(self.sender.process, posted.future.set_exception, wrong)
            return
        if posted.payload:
            handler = self.receiver.handlers[posted.payload[0]]
            _run(self.reader, handler, self.sender.name, posted.payload)
        _run(self.sender.process, posted.future.set_result, None)

    def lose(self, why: str) -> None:
        flight, self.flight = self.flight, deque()
        for posted in flight:
            _run(self.sender.process, _fail, posted.future, PeerLostError(why))


class KvNetwork:
    """The transports of all processes, by name."""

    def __init__(self) -> None:
        self.ends: dict[str, SimTransport] = {}
        self._wires: dict[tuple[str, str], KvWire] = {}

    def wire(self, sender: SimTransport, receiver: SimTransport) -> KvWire:
        key = sender.name, receiver.name
        if key not in self._wires:
            self._wires[key] = KvWire(sender, receiver)
        return self._wires[key]

    def wires(self) -> list[KvWire]:
        return [wire for wire in self._wires.values() if wire.flight]

    def close(self, process: Process) -> None:
        """A process is dead."""
        for key, wire in list(self._wires.items()):
            if process is wire.sender.process:
                del self._wires[key]
            elif process is wire.reader:
                del self._wires[key]
                wire.lose(f"{wire.receiver.name} is gone")


class SimTransport:
    """One process's end; a `Transport`."""

    def __init__(self, name: str, process: Process, network: KvNetwork) -> None:
        self.name = name
        self.process = process
        self.regions: list[Memory] = []
        self.handlers: dict[int, Handler] = {}
        #: Called after a write of a peer to memory here.
        self.on_written: Callable[[Memory, Runs], None] = lambda memory, runs: None
        self._network = network
        self._peers: set[str] = set()
        network.ends[name] = self

    def register(self, memory: Memory) -> int:
        self.regions.append(memory)
        return len(self.regions) - 1

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> Future[str]:
        future: Future[str] = Future()
        peer = metadata.decode()
        if self.is_dead(peer, known=False):
            future.set_exception(PeerLostError(f"{peer} is gone"))
        else:
            self._peers.add(peer)
            future.set_result(peer)
        return future

    def write(
        self,
        peer: str,
        runs: Runs,
        notification: bytes,
        *,
        region: int = 0,
        peer_region: int = 0,
        urgent: bool = False,
    ) -> Future[None]:
        return self._post(peer, Posted(Future(), notification, runs, region, peer_region))

    def notify(self, peer: str, payload: bytes, *, urgent: bool = False) -> Future[None]:
        return self._post(peer, Posted(Future(), payload))

    def _post(self, peer: str, posted: Posted) -> Future[None]:
        if peer not in self._peers:
            posted.future.set_exception(PeerLostError(f"{peer} is not connected"))
        elif self.process.has_lost or self.is_dead(peer):
            posted.future.set_exception(PeerLostError(f"{peer} is gone"))
        else:
            self._network.wire(self, self._network.ends[peer]).post(posted)
        return posted.future

    def subscribe(self, channel: int, handler: Handler) -> None:
        self.handlers[channel] = handler

    def listening(self) -> AbstractContextManager[None]:
        return nullcontext()

    def progress(self) -> bool:
        return False

    def is_dead(self, peer: str, *, known: bool = True) -> bool:
        if known and peer not in self._peers:
            return False
        return self._network.ends[peer].process.has_lost

    def disconnect(self, peer: str) -> Future[None]:
        self._peers.discard(peer)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Ends nothing: the process ends."""


def _run(process: Process, call: Callable[..., Any], *args: Any) -> None:
    """Runs a call on a process's transport thread."""
    if process.has_lost:
        return
    if process.paused:
        process.post(call, *args)
    else:
        process.call(call, *args)


def _fail(future: Future[None], error: TransferError) -> None:
    if future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)
