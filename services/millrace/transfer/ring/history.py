"""Writes the history of one instance into another instance's pages, layer by layer.

A giver has at most two layers in flight, each with one notification, so attention over a layer can
begin while later layers are in flight. It writes only within `lease_s` of the receiver's last
message, and asks the receiver when the lease has run out.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.ring.messages import KEPT, RING_CHANNEL, RingKind, RingMessage
from millrace.transfer.ring.recent import Recent
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import at_layer
from millrace.transfer.transport.runs import Runs

#: Layers in flight at most: while one moves, the next one waits.
MAX_IN_FLIGHT = 2


class LayerArrivals:
    """Counts the layers of others' history that have arrived. Pure."""

    def __init__(self, layers: range) -> None:
        """`layers`: the model's layers on this instance."""
        self._layers = layers
        self._missing: dict[tuple[str, int], set[int]] = {}  # by giver and chunk

    def expect(self, giver: str, chunk: int) -> None:
        """Expects a peer's history of a chunk, in all layers.

        Raises ValueError when that history is expected already.
        """
        if (giver, chunk) in self._missing:
            raise ValueError(f"{giver} is asked for the history of chunk {chunk} already")
        self._missing[giver, chunk] = set(self._layers)

    def arrived(self, giver: str, chunk: int, layer: int) -> None:
        """Notes a layer. Raises ValueError for a layer that is not expected, or came before."""
        try:
            self._missing[giver, chunk].remove(layer)
        except KeyError:
            raise ValueError(
                f"layer {layer} of the history of chunk {chunk} came unexpectedly"
            ) from None

    def has(self, layer: int) -> bool:
        """Returns whether all expected history of the layer has arrived."""
        return not any(layer in missing for missing in self._missing.values())

    def missing(self) -> set[tuple[str, int]]:
        """Returns (giver, chunk) of every expected history with a missing layer."""
        return {given for given, missing in self._missing.items() if missing}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A giver's writes to a peer: all layers, from `region` with `layout` to the peer's region.

    `runs` come from `transfer.transport.layout.layer_runs`; each layer shifts them.
    """

    peer: str  # the transport's name
    runs: Runs
    layout: KvLayout
    peer_layout: KvLayout
    region: int = 0
    peer_region: int = 0


class Gift:
    """All layers of some history in flight to a peer. Any thread may call its methods.

    `over` is done once all layers lie at the peer. After `stop` or a failure it is done once
    nothing is in flight any more; a failure raises TransferError. `began_s` and `ended_s` are times
    of time.monotonic.
    """

    def __init__(
        self,
        transport: Transport,
        history: History,
        message: RingMessage,
        *,
        lease_s: float,
        heard_s: float,
    ) -> None:
        """`message` goes with every layer; `number` gives the model's layer. `heard_s`: when the
        peer was last heard of, in seconds of time.monotonic.
        """
        self.bytes_sent = 0
        self.began_s = self.ended_s = time.monotonic()
        self.peer = history.peer
        self.key = message.key
        self.chunk = message.chunk
        self.over: Future[None] = Future()
        self.over.set_running_or_notify_cancel()  # only `stop` ends it
        self._transport = transport
        self._history = history
        self._message = message
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._heard_s = heard_s
        self._asked = False
        self._layer = history.peer_layout.layer_start
        self._writes: set[Future[None]] = set()
        self._stopped = self._is_settled = False
        self._failure: TransferError | None = None
        self._pump()

    def heard(self) -> None:
        """Notes a message of the peer: it still wants the history."""
        with self._lock:
            self._heard_s = time.monotonic()
            self._asked = False
        self._pump()

    def stop(self) -> None:
        """Posts no more layers."""
        with self._lock:
            self._stopped = True
            writes = list(self._writes)
        for write in writes:
            write.cancel()  # writes that the transport has not posted yet
        self._pump()

    def _pump(self) -> None:
        posted = []
        with self._lock:
            while self._has_more and len(self._writes) < MAX_IN_FLIGHT and self._may_write():
                write = self._write(self._layer)
                self._layer += 1
                self._writes.add(write)
                posted.append(write)
            over = not self._has_more and not self._writes and not self._is_settled
            self._is_settled = self._is_settled or over
            if over:
                self.ended_s = time.monotonic()
        for write in posted:
            write.add_done_callback(self._written)
        if over and self._failure is None:
            self.over.set_result(None)
        elif over:
            self.over.set_exception(self._failure)

    @property
    def _has_more(self) -> bool:
        return not self._stopped and self._layer < self._history.peer_layout.layer_end

    def _may_write(self) -> bool:
        if time.monotonic() - self._heard_s <= self._lease_s:
            return True
        if not self._asked:
            self._asked = True
            renew = replace(self._message, kind=RingKind.RENEW, number=0)
            self._transport.notify(self.peer, renew.encode())
        return False

    def _write(self, layer: int) -> Future[None]:
        history = self._history
        payload = replace(self._message, number=layer).encode()
        if not len(history.runs):
            return self._transport.notify(self.peer, payload)
        return self._transport.write(
            self.peer,
            at_layer(history.runs, history.layout, history.peer_layout, layer),
            payload,
            region=history.region,
            peer_region=history.peer_region,
        )

    def _written(self, write: Future[None]) -> None:
        error = None if write.cancelled() else write.exception()
        with self._lock:
            self._writes.discard(write)
            if error is not None:
                self._stopped = True
                self._failure = TransferError(
                    f"history of request {self._message.request_id} for {self.peer}: {error}"
                )
            elif not write.cancelled():
                self.bytes_sent += self._history.runs.total_bytes
        self._pump()


class HistoryGiver:
    """Writes a kept prefix from a decode instance to the members that continue the prompt.

    A transport has one HistoryGiver or one RingManager, not both: both take the ring's channel.
    """

    def __init__(self, transport: Transport, lease_s: float) -> None:
        self._transport = transport
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._gifts: dict[tuple[str, int, str], Gift] = {}  # by request, attempt and peer
        self._given_up: Recent[tuple[str, int, str]] = Recent()
        transport.subscribe(RING_CHANNEL, self._on_notification)

    def give(self, request_id: str, attempt: int, history: History) -> Gift:
        """Begins to write at once. The pages are read until the gift is `over`.

        The receiver waits for it by `GroupLink.fetched`. Raises TransferError when the receiver has
        given the attempt up, or gets the history already.
        """
        message = RingMessage(
            kind=RingKind.LAYER, request_id=request_id, attempt=attempt, chunk=KEPT
        )
        key = (request_id, attempt, history.peer)
        with self._lock:
            if key in self._given_up or key in self._gifts:
                raise TransferError(
                    f"request {request_id}: {history.peer} has no use for the history of attempt "
                    f"{attempt}"
                )
            gift = self._gifts[key] = Gift(
                self._transport,
                history,
                message,
                lease_s=self._lease_s,
                heard_s=time.monotonic(),
            )
        gift.over.add_done_callback(partial(self._on_over, key))
        return gift

    def check_integrity(self) -> None:
        """Raises IntegrityError when a gift is still in flight: call this when idle."""
        if self._gifts:
            raise IntegrityError(f"history is still in flight: {sorted(self._gifts)}")

    def _on_over(self, key: tuple[str, int, str], over: Future[None]) -> None:
        with self._lock:
            del self._gifts[key]
        if over.exception() is not None:  # otherwise the receiver would wait for the rest
            request_id, attempt, peer = key
            abort = RingMessage(kind=RingKind.ABORT, request_id=request_id, attempt=attempt)
            self._transport.notify(peer, abort.encode())

    def _on_notification(self, peer: str, payload: bytes) -> None:
        """Handles a receiver's notification, on the transport's thread."""
        message = RingMessage.decode(payload)
        key = (message.request_id, message.attempt, peer)
        with self._lock:
            gift = self._gifts.get(key)
            if message.kind is RingKind.ABORT:
                self._given_up.add(key)
        if message.kind is not RingKind.ABORT:
            if gift is not None:
                gift.heard()
            return
        drained = partial(self._say_drained, peer, message)
        if gift is None:
            drained()
        else:
            gift.stop()
            gift.over.add_done_callback(lambda _: drained())

    def _say_drained(self, peer: str, message: RingMessage) -> None:
        self._transport.notify(peer, replace(message, kind=RingKind.DRAINED).encode())
