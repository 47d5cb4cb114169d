"""Sends queries and new K/V from the KV owner to KVP workers, and collects partial results.

Each instance has one exchange, and one pair per incarnation of a KVP worker. A pair has at most one
request in flight, so no other request uses the pair's memory at either end until the answer has
arrived. The data to send already lies in this end's memory. An answer counts when it names the
pass, piece and layer of the open request; the exchange drops late answers of earlier passes. A lost
pair is never used again: the exchange lends its memory to another pair only after no write of that
worker can land there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv.kvp_pass import ExchangeShape, Reply, Request
from millrace.transfer.kvp.attentive import next_of
from millrace.transfer.kvp.messages import TO_OWNER, KvpKind, KvpMessage
from millrace.transfer.kvp.places import Places
from millrace.transfer.transport.base import INLINE_BYTES, Transport, outcome
from millrace.transfer.transport.regions import Memory, host_bytes
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
"""Seconds between checks for dead KVP workers and missed deadlines during a wait."""

_MOST_RUNS: Final = 256  # the most byte runs that a pair caches, by size


class Offer(NamedTuple):
    """The place of a KVP worker's partial results; `Kvp.Attach` carries it to the worker."""

    place: int
    region: int
    offset: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Pair:
    worker: str
    place: int
    peer: str  # the transport's name
    slot: int
    region: int
    offset: int
    waiting: tuple[int, int, int] | None = None  # pass, piece and layer of the answer to come
    rows: int = 0  # of the answer to come
    posted_s: float = 0.0
    write: Future[None] | None = None
    runs: dict[tuple[int, int], Runs] = field(default_factory=dict)
    lost: str = ""


class KvpExchange:
    """Connects one KV owner to all its KVP workers.

    Only the compute thread may call `begin`, `post` and `wait`; any thread may call the rest.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Memory,
        shape: ExchangeShape,
        *,
        workers: int,
        timeout_s: float,
        lease_s: float,
        on_lost: Callable[[str, str], None] = lambda worker, why: None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`memory` has `memory_bytes` bytes on the host; the exchange registers it. `timeout_s`
        limits the wait for one answer. `on_lost` is called once per lost KVP worker, on any thread,
        with the reason. Requests of more than `inline_bytes` go by a write.

        Raises ValueError when the memory is too small.
        """
        if memory.nbytes < self.memory_bytes(shape, workers):
            raise ValueError(f"{memory.nbytes} bytes can't hold an exchange with {workers} workers")
        self.shape = shape
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._inline_bytes = inline_bytes
        self._region = transport.register(memory)
        self._bytes = host_bytes(memory)
        self._places = Places(transport, workers, lease_s)
        self._lock = threading.Lock()
        self._pairs: dict[str, _Pair] = {}
        self._by_slot: dict[tuple[str, int], _Pair] = {}
        self._listening = ExitStack()
        self._events: SimpleQueue[tuple[_Pair, KvpMessage | None]] = SimpleQueue()
        # Only the compute thread uses the fields below.
        self._of_pass: dict[str, _Pair] = {}  # the pairs of the open pass
        self._number = 0  # number of the pass
        self._outstanding = 0  # answers that are due
        transport.subscribe(TO_OWNER, self._on_notification)

    @staticmethod
    def memory_bytes(shape: ExchangeShape, workers: int) -> int:
        """Returns the bytes of memory of an exchange with `workers` KVP workers at once."""
        return workers * (shape.request_bytes + shape.reply_bytes)

    # -- attaching

    def offer(self) -> Offer:
        """Reserves a place for a new KVP worker; call `attach` or `withdraw` next.

        Raises CapacityError when no place is free.
        """
        place = self._places.take()
        return Offer(place, self._region, self._reply_at(place))

    def withdraw(self, offer: Offer) -> None:
        """Takes back the place of a KVP worker that refused and does not know the place."""
        self._places.give(offer.place)

    async def attach(
        self, worker: str, offer: Offer, *, metadata: bytes, slot: int, region: int, offset: int
    ) -> None:
        """Opens the pair with the KVP worker's answer to `Kvp.Attach`.

        Raises TransferError, with the place withdrawn, when the worker can't be reached.
        """
        try:
            peer = await outcome(self._transport.connect(metadata))
            pair = _Pair(
                worker=worker,
                place=offer.place,
                peer=peer,
                slot=slot,
                region=region,
                offset=offset,
            )
            with self._lock:
                if worker in self._pairs:
                    raise TransferError(f"the exchange has {worker} already")
                if not self._pairs:
                    self._listening.enter_context(self._transport.listening())
                self._pairs[worker] = self._by_slot[peer, slot] = pair
        except BaseException:  # also when cancelled
            self._places.give(offer.place)
            raise

    def lose(self, worker: str, why: str) -> None:
        """Marks a KVP worker as lost: a waiting caller continues without it, at once."""
        with self._lock:
            pair = self._pairs.get(worker)
        if pair is not None:
            self._lose(pair, why)

    def detach(self, worker: str) -> None:
        """Ends a pair, if there is one; the KVP worker may attach again."""
        with self._lock:
            pair = self._pairs.pop(worker, None)
            if pair is None:
                return
            del self._by_slot[pair.peer, pair.slot]
            if not self._pairs:
                self._listening.close()
        pair.lost = pair.lost or f"{worker} was detached"
        self._events.put((pair, None))
        self._places.leave(pair.place, pair.peer, pair.slot)
        if pair.write is None:
            self._say_bye(pair)
        else:
            pair.write.add_done_callback(lambda _: self._say_bye(pair))

    def workers(self) -> dict[str, str]:
        """Returns the attached KVP workers, each with the reason of its loss; empty while it
        works.
        """
        with self._lock:
            return {worker: pair.lost for worker, pair in self._pairs.items()}

    # -- a pass

    def begin(self) -> None:
        """Opens a new pass, after every request of the earlier pass was answered or lost."""
        while self.wait() is not None:
            pass
        self._of_pass = {}
        self._number += 1

    def at(self, worker: str) -> tuple[int, int] | None:
        """Takes a KVP worker into the pass and returns two offsets in this end's memory: of the
        request to it, as `ExchangeShape` lays it out, and of its partial results. None without such
        a worker.
        """
        with self._lock:
            pair = self._pairs.get(worker)
        if pair is None:
            return None
        self._of_pass[worker] = pair
        at = pair.place * (self.shape.request_bytes + self.shape.reply_bytes)
        return at, at + self.shape.request_bytes

    def post(self, worker: str, request: Request) -> None:
        """Sends the request that lies at the worker's place; `wait` returns its answer or its loss.

        Raises TransferError when the worker has not answered the last request yet.
        """
        pair = self._of_pass[worker]
        if pair.waiting is not None:
            raise TransferError(f"{worker} has not answered the last request")
        piece, layer, rows, new_rows, entries = request
        pair.waiting = self._number, piece, layer
        pair.rows = rows
        pair.posted_s = time.monotonic()
        self._outstanding += 1
        if pair.lost:
            self._events.put((pair, None))
            return
        message = KvpMessage(
            KvpKind.LAYER, pair.slot, self._number, piece, layer, rows, new_rows, entries
        )
        nbytes = self.shape.sent_bytes(rows, new_rows)
        table_bytes = entries * self.shape.entry_bytes
        if nbytes + table_bytes <= self._inline_bytes:
            body = self._body(pair, nbytes, table_bytes)
            payload = message._replace(body=body).encode()
            pair.write = self._transport.notify(pair.peer, payload, urgent=True)
        else:
            pair.write = self._transport.write(
                pair.peer,
                self._runs(pair, nbytes, entries),
                message.encode(),
                region=self._region,
                peer_region=pair.region,
                urgent=True,
            )
        pair.write.add_done_callback(partial(self._on_written, pair))

    def wait(self) -> Reply | None:
        """Returns the next answer of any KVP worker; None when no answer is due."""
        while self._outstanding:
            event = next_of(self._events, self._transport, LOOK_S)
            if event is None:
                self._look()
                continue
            pair, message = event
            if pair.waiting is None or (message is None and not pair.lost):
                continue
            if message is not None:
                if pair.waiting != (message.number, message.piece, message.layer):
                    log.debug("a late %s of %s", message.kind.name, pair.worker)
                    continue
                if message.kind is KvpKind.FAILED:
                    self._lose(pair, message.body.decode(errors="replace"))
                elif wrong := self._misfit(pair, message):
                    self._lose(pair, wrong)
                    message = None
            pair.waiting = None
            self._outstanding -= 1
            if message is None or message.kind is KvpKind.FAILED:
                return Reply(pair.worker, lost=pair.lost)
            if results := message.results:
                at = self._reply_at(pair.place)
                self._bytes[at : at + len(results)] = np.frombuffer(results, dtype=np.uint8)
            return Reply(pair.worker, message.missing())
        return None

    def check_integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError when pairs and places disagree, or with `idle` when one is left."""
        with self._lock:
            if idle and self._pairs:
                raise IntegrityError(f"the exchange still has {sorted(self._pairs)}")
            if len(self._by_slot) != len(self._pairs):
                raise IntegrityError("the exchange's two tables of pairs differ in length")
        self._places.check_integrity(idle=idle)

    # -- inside

    def _reply_at(self, place: int) -> int:
        shape = self.shape
        return place * (shape.request_bytes + shape.reply_bytes) + shape.request_bytes

    def _body(self, pair: _Pair, nbytes: int, table_bytes: int) -> bytes:
        """Returns the row table, the queries and the K/V as bytes, in the order of `_runs`."""
        table = self._reply_at(pair.place) - self.shape.request_bytes
        q = table + self.shape.queries_at
        parts = self._bytes[table : table + table_bytes], self._bytes[q : q + nbytes]
        return b"".join(part.tobytes() for part in parts)

    def _runs(self, pair: _Pair, nbytes: int, entries: int) -> Runs:
        """Returns the runs of row table, queries and K/V from our memory to the worker's memory."""
        runs = pair.runs.get((nbytes, entries))
        if runs is None:
            source = self._reply_at(pair.place) - self.shape.request_bytes
            at = self.shape.queries_at
            pieces = [Runs.of(source + at, pair.offset + at, nbytes)]
            if entries:
                table = Runs.of(source, pair.offset, entries * self.shape.entry_bytes)
                pieces.insert(0, table)
            runs = Runs.joined(pieces)
            if len(pair.runs) == _MOST_RUNS:
                pair.runs.clear()
            pair.runs[nbytes, entries] = runs
        return runs

    def _misfit(self, pair: _Pair, message: KvpMessage) -> str:
        """Returns why an answer can't be the one to the open request; empty when it can."""
        nbytes = self.shape.returned_bytes(pair.rows)
        inline = nbytes if nbytes <= self._inline_bytes else 0
        if message.rows == pair.rows and len(message.results) == inline:
            return ""
        return (
            f"{pair.worker} answered with {message.rows} rows in {len(message.results)} bytes; "
            f"{pair.rows} rows in {inline} bytes were due"
        )

    def _look(self) -> None:
        """Finds KVP workers that have ended, and deadlines that have passed."""
        now_s = time.monotonic()
        for pair in self._of_pass.values():
            if pair.waiting is None:
                continue
            if self._transport.is_dead(pair.peer):
                self._lose(pair, f"{pair.worker} has ended")
            elif now_s - pair.posted_s > self._timeout_s:
                self._lose(pair, f"{pair.worker} did not answer within {self._timeout_s:g} s")

    def _lose(self, pair: _Pair, why: str) -> None:
        with self._lock:
            is_news, pair.lost = not pair.lost, pair.lost or why
        self._events.put((pair, None))
        if is_news:
            self._on_lost(pair.worker, why)

    def _on_written(self, pair: _Pair, write: Future[None]) -> None:
        """Loses the worker when a write failed. Runs on the transport's thread."""
        error = None if write.cancelled() else write.exception()
        if error is not None:
            self._lose(pair, f"{pair.worker}: {error}")

    def _say_bye(self, pair: _Pair) -> None:
        sent = self._transport.notify(pair.peer, KvpMessage(KvpKind.BYE, pair.slot).encode())
        self._places.watch(pair.peer, pair.slot, sent)

    def _on_notification(self, peer: str, payload: bytes) -> None:
        """Handles a KVP worker's notification, on the transport's thread."""
        try:
            message = KvpMessage.decode(payload)
        except TransferError as error:
            self._misheard(peer, error)
            return
        key = (peer, message.slot)
        pair = self._by_slot.get(key)
        if message.kind is KvpKind.GONE:
            self._places.drained(*key)
            if pair is not None:
                self._lose(pair, f"{pair.worker} ended the exchange")
        elif pair is not None:
            self._events.put((pair, message))

    def _misheard(self, peer: str, error: TransferError) -> None:
        """Loses a KVP worker whose notification can't be read: its answer may have been in it."""
        with self._lock:
            pairs = [pair for pair in self._pairs.values() if pair.peer == peer]
        for pair in pairs:
            self._lose(pair, f"{pair.worker}: {error}")
