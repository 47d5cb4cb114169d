"""Serves attention over the shards of one KVP worker to the shards' KV owners.

KV owners write queries and new K/V into their places. One thread serves the places in the order of
arrival, so two instances that hold shards for each other never wait for each other's passes. Only
this thread reads and writes the pages of shards. So after `close_shard` has returned, nothing uses
the shard's pages any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.transfer.kvp.attentive import next_of
from millrace.transfer.kvp.messages import TO_WORKER, KvpKind, KvpMessage, missing_body
from millrace.transfer.kvp.places import Places
from millrace.transfer.transport.base import INLINE_BYTES, Transport, outcome
from millrace.transfer.transport.regions import Memory, host_bytes
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)


class ShardCompute(Protocol):
    """`engine.attention.kvp_worker.ShardAttention`; any thread may call `open` and `landed`, only
    the server's thread the rest.
    """

    def open(self, shard: int, pages: Sequence[int], start_token: int, end_token: int) -> None: ...
    def landed(self, shard: int, end_token: int) -> None: ...
    def close(self, shard: int) -> None: ...
    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int) -> None: ...
    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]: ...
    def forget(self, slot: int) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Owner:
    peer: str  # the transport's name
    slot: int
    place: int
    region: int
    offset: int
    number: int = 0  # number of its last pass
    served: tuple[int, int, int] | None = None  # pass, piece and layer of its last request
    write: Future[None] | None = None
    runs: dict[int, Runs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attachment:
    """The answer to `Kvp.Attach`: the KV owner's slot, and where its queries go."""

    slot: int
    region: int
    offset: int


class KvpServer:
    """Serves the shards of one KVP worker to all their KV owners. Any thread may call it."""

    def __init__(
        self,
        transport: Transport,
        memory: Memory,
        shape: ExchangeShape,
        compute: ShardCompute,
        *,
        owners: int,
        lease_s: float,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`memory` has `memory_bytes` bytes on the host; the server registers it, and `compute` has
        the same memory. Results of more than `inline_bytes` go by a write.

        Raises ValueError when the memory is too small.
        """
        if memory.nbytes < self.memory_bytes(shape, owners):
            raise ValueError(f"{memory.nbytes} bytes can't hold a server for {owners} owners")
        self._transport = transport
        self._shape = shape
        self._compute = compute
        self._inline_bytes = inline_bytes
        self._region = transport.register(memory)
        self._bytes = host_bytes(memory)
        self._places = Places(transport, owners, lease_s)
        self._lock = threading.Lock()
        self._slots = count(1)
        self._numbers = count(1)
        self._owners: dict[int, _Owner] = {}
        self._shards: set[int] = set()
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listening = ExitStack()
        self._thread = threading.Thread(target=self._serve, name="kvp-server", daemon=True)
        self._thread.start()
        transport.subscribe(TO_WORKER, self._on_notification)

    @staticmethod
    def memory_bytes(shape: ExchangeShape, owners: int) -> int:
        """Returns the bytes of memory of a server for `owners` KV owners at once."""
        return owners * (shape.request_bytes + shape.reply_bytes)

    # -- owners

    async def attach(self, *, metadata: bytes, region: int, offset: int) -> Attachment:
        """Opens a pair with the data of a KV owner's `Kvp.Attach`.

        Raises CapacityError when no place is free, TransferError when the owner can't be reached.
        """
        place = self._places.take()
        try:
            peer = await outcome(self._transport.connect(metadata))
        except BaseException:  # also when cancelled
            self._places.give(place)
            raise
        owner = _Owner(peer=peer, slot=next(self._slots), place=place, region=region, offset=offset)
        with self._lock:
            if not self._owners:
                self._listening.enter_context(self._transport.listening())
            self._owners[owner.slot] = owner
        return Attachment(owner.slot, self._region, self._at(owner)[0])

    def detach(self, slot: int) -> None:
        """Ends a pair, if there is one, from this side or because the KV owner has gone.

        Its place is lent again once no write of the KV owner can land there.
        """
        with self._lock:
            owner = self._owners.pop(slot, None)
            if owner is None:
                return
            if not self._owners:
                self._listening.close()
            self._places.leave(owner.place, owner.peer, slot)
        self._works.put(partial(self._leave, owner))

    # -- shards

    def open_shard(self, pages: Sequence[int], start_token: int, end_token: int) -> int:
        """Opens a shard of the tokens [start_token, end_token) and returns its number, never used
        twice. The caller frees the pages after `close_shard`.
        """
        number = next(self._numbers)
        self._compute.open(number, pages, start_token, end_token)
        with self._lock:
            self._shards.add(number)
        return number

    def landed(self, shard: int, end_token: int) -> None:
        """Notes that the K/V of [start_token, end_token) lies in the shard's pages: K/V from the
        exchange is stored from end_token on.
        """
        self._compute.landed(shard, end_token)

    def close_shard(self, shard: int) -> Future[None]:
        """Returns a future that is done once no pass reads or writes the shard's pages, now or
        later.
        """
        closed: Future[None] = Future()

        def close() -> None:
            self._compute.close(shard)
            closed.set_result(None)

        with self._lock:
            self._shards.discard(shard)
        self._works.put(close)
        return closed

    def check_integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError when a place was lost, or with `idle` when a pair or shard is
        open.
        """
        with self._lock:
            if idle and (self._owners or self._shards):
                raise IntegrityError(
                    f"the server has {len(self._owners)} owners and shards {sorted(self._shards)}"
                )
        self._places.check_integrity(idle=idle)

    def close(self) -> None:
        """Ends the thread; call it before the transport is closed."""
        with self._lock:
            slots = list(self._owners)
        for slot in slots:
            self.detach(slot)
        self._works.put(None)
        self._thread.join()

    # -- the thread

    def _serve(self) -> None:
        while True:
            work = next_of(self._works, self._transport, None)
            if work is None:
                return
            try:
                work()
            except Exception:
                log.exception("the KVP server failed at an event")

    def _layer(self, owner: _Owner, message: KvpMessage) -> None:
        """Computes a layer of a piece: stores its K/V, attends, and sends the partial results."""
        if self._owners.get(owner.slot) is not owner:  # the KV owner has left
            return
        request = (message.number, message.piece, message.layer)
        if request == owner.served:  # it came twice: the next one may lie in its place by now
            return
        owner.served = request
        try:
            missing = self._attend(owner, message)
        except Exception as error:  # else the KV owner waits for its deadline
            log.warning("a piece of %s failed", owner.peer, exc_info=True)
            reason = str(error).encode()
            answer = message._replace(kind=KvpKind.FAILED, entries=0, body=reason).encode()
            self._transport.notify(owner.peer, answer)
            return
        self._answer(owner, message, missing)

    def _answer(self, owner: _Owner, message: KvpMessage, missing: Sequence[int]) -> None:
        answer = message._replace(
            kind=KvpKind.PARTIAL, entries=len(missing), body=missing_body(missing)
        )
        nbytes = self._shape.returned_bytes(message.rows)
        if nbytes <= self._inline_bytes:
            at = self._at(owner)[1]
            body = answer.body + self._bytes[at : at + nbytes].tobytes()
            inline = answer._replace(body=body).encode()
            owner.write = self._transport.notify(owner.peer, inline, urgent=True)
            return
        owner.write = self._transport.write(
            owner.peer,
            self._runs(owner, nbytes),
            answer.encode(),
            region=self._region,
            peer_region=owner.region,
            urgent=True,
        )

    def _attend(self, owner: _Owner, message: KvpMessage) -> Sequence[int]:
        self._check(message)
        if message.number < owner.number:
            raise TransferError(f"pass {message.number} comes after pass {owner.number}")
        if message.number > owner.number:
            owner.number = message.number
            self._compute.forget(owner.slot)
        if message.body:
            self._take_in(owner, message)
        if message.entries:
            self._compute.begin(owner.slot, message.piece, self._at(owner), message.entries)
        return self._compute.layer(owner.slot, message.piece, message.layer)

    def _check(self, message: KvpMessage) -> None:
        """Raises TransferError for a request that does not fit into the pair's memory."""
        shape = self._shape
        end = message.entries * shape.entry_bytes
        fits = message.new_rows <= message.rows <= shape.max_rows and end <= shape.queries_at
        nbytes = end + shape.sent_bytes(message.rows, message.new_rows) if fits else 0
        if not fits or (not message.body and nbytes <= self._inline_bytes):
            raise _misfit(message)

    def _take_in(self, owner: _Owner, message: KvpMessage) -> None:
        """Copies a notification's data to the place where a write would have put it."""
        shape, at = self._shape, self._at(owner)[0]
        end = message.entries * shape.entry_bytes
        nbytes = shape.sent_bytes(message.rows, message.new_rows)
        if len(message.body) != end + nbytes:
            raise _misfit(message)
        body, q = np.frombuffer(message.body, dtype=np.uint8), at + shape.queries_at
        self._bytes[at : at + end] = body[:end]
        self._bytes[q : q + nbytes] = body[end:]

    def _leave(self, owner: _Owner) -> None:
        self._compute.forget(owner.slot)
        if owner.write is None:
            self._say_gone(owner)
        else:
            owner.write.add_done_callback(lambda _: self._say_gone(owner))

    # -- inside

    def _at(self, owner: _Owner) -> tuple[int, int]:
        """Returns the offsets of the KV owner's queries and of its partial results here."""
        at = owner.place * (self._shape.request_bytes + self._shape.reply_bytes)
        return at, at + self._shape.request_bytes

    def _runs(self, owner: _Owner, nbytes: int) -> Runs:
        runs = owner.runs.get(nbytes)
        if runs is None:
            runs = owner.runs[nbytes] = Runs.of(self._at(owner)[1], owner.offset, nbytes)
        return runs

    def _say_gone(self, owner: _Owner) -> None:
        sent = self._transport.notify(owner.peer, KvpMessage(KvpKind.GONE, owner.slot).encode())
        self._places.watch(owner.peer, owner.slot, sent)

    def _on_notification(self, peer: str, payload: bytes) -> None:
        """Handles a KV owner's notification, on the transport's thread."""
        try:
            message = KvpMessage.decode(payload)
        except TransferError as error:
            self._misheard(peer, error)
            return
        owner = self._owners.get(message.slot)
        is_its = owner is not None and owner.peer == peer
        if message.kind is KvpKind.BYE:
            if is_its:
                self.detach(message.slot)
            self._places.drained(peer, message.slot)
        elif owner is not None and is_its:
            self._works.put(partial(self._layer, owner, message))

    def _misheard(self, peer: str, error: TransferError) -> None:
        """Ends the pairs of a KV owner whose notification can't be read: it learns it by GONE."""
        log.warning("%s: %s", peer, error)
        with self._lock:
            slots = [owner.slot for owner in self._owners.values() if owner.peer == peer]
        for slot in slots:
            self.detach(slot)


def _misfit(message: KvpMessage) -> TransferError:
    return TransferError(
        f"{len(message.body)} bytes came with {message.rows} rows, {message.new_rows} new ones and "
        f"{message.entries} entries"
    )
