"""Sends one request's K/V: queues layers, writes them once granted, counts and drains them.

The event loop owns the state; only `layer_ready` may be called from another thread. The transport's
thread posts the writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from millrace.concurrency import cancel
from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.transfer import (
    HandshakeAsk,
    HandshakeGrant,
    HandshakeQueued,
    HandshakeRefused,
    Ticket,
)
from millrace.transfer.push.checksums import PartSums, unreadable
from millrace.transfer.push.control import KvPeer, Outlet, SendTimings
from millrace.transfer.push.messages import Kind, Message, WrittenRange
from millrace.transfer.push.send.batching import Batch, PartQueue, Ready
from millrace.transfer.push.send.slots import Slots
from millrace.transfer.transport.base import outcome
from millrace.transfer.transport.layout import Side, mismatch

log = logging.getLogger(__name__)

#: Writes in flight at most: while one moves, the next waits; layers that get ready go together.
MAX_IN_FLIGHT = 2
ABORT_TIMEOUT_S = 5.0


class SendSession:
    """Sends KV to one receiver; made by `SendManager`. A `Sending`.

    It sends the tokens [start, end) that `side` has and the receiver wants, in the layers that the
    receiver has. With `speaks` False it has nothing to send and sends no end message.
    """

    def __init__(
        self,
        *,
        ticket: Ticket,
        side: Side,
        tokens: tuple[int, int],
        speaks: bool,
        peer: KvPeer,
        outlet: Outlet,
        config: TransferConfig,
        on_over: Callable[[SendSession], None],
    ) -> None:
        self.ticket = ticket
        self.timings = SendTimings(time.monotonic())
        self._side = side
        self._layout = side.layout
        self._tokens = tokens
        self._control = peer
        self._outlet = outlet
        self._transport = outlet.transport
        self._config = config
        self._on_over = on_over
        self._asks = False  # a handshake was sent that is not answered
        self._loop = asyncio.get_running_loop()
        self._queue = PartQueue(side, tokens[1] - tokens[0], tokens[0])
        self._called = False  # whether the loop will soon take the queued layers
        self._writes: dict[Future[None], int] = {}
        self._done: deque[Future[None]] = deque()
        self._notified = False  # whether the loop will soon take the ended writes
        self._slots = Slots()
        self._grant: HandshakeGrant | None = None
        self._sums: PartSums | None = None  # where the receiver asks for checksums
        self._peer = ""
        self._heard_s = self._progress_s = time.monotonic()
        self._failure: TransferError | None = None
        self._dropped = not speaks
        self._over = False
        self._aborting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._opening = self._loop.create_task(self._open())
        self._opening.add_done_callback(lambda _: self._answered.set())

    @property
    def failure(self) -> TransferError | None:
        return self._failure

    @property
    def receiver_ids(self) -> tuple[str, ...]:
        return (self.ticket.receiver.id,)

    # -- for prefill, as `Sending` says

    def layer_ready(self, chunk_index: int, layer: int, start_token: int, num_tokens: int) -> None:
        self._queue.add(Ready(chunk_index, layer, start_token, num_tokens))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._come_by)

    async def answered(self) -> None:
        """Returns when the receiver has granted, refused or queued the handshake, or can't be
        reached.

        It ends within `handshake_timeout_s`, also when two requests wait for each other.
        """
        await self._answered.wait()

    async def opened(self) -> None:
        await asyncio.wait([self._opening])

    async def finish(self, message: Any | None) -> None:  # noqa: ANN401 - the wire's type
        await self.opened()  # a short prompt is computed before the handshake is over
        if message is not None:
            await self._tell_finish(message)
        while not self._settled:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        self._notify(Kind.DONE)
        await self._end()

    async def abort(self, reason: str) -> None:
        if self._over:
            return
        self.fail(self._error(reason))
        self._opening.cancel()
        if self._aborting is None:
            self._aborting = self._loop.create_task(self._abort(reason))
        await asyncio.shield(self._aborting)  # the session ends even if the caller is cancelled

    async def _abort(self, reason: str) -> None:
        if self._writes:
            await self._tell_abort(reason, drained=False)
        while self._writes:
            self._changed.clear()
            await self._changed.wait()
        if not await self._tell_abort(reason, drained=True) and self._asks:
            # The receiver may grant it later. It would wait for ever for a sender that does not
            # know its transport and can't answer there.
            self._outlet.repeat(partial(self._say_abort, reason, drained=True))
        await self._end()

    # -- for the manager

    def take(self, peer: str, message: Message) -> bool:
        """Takes a receiver's notification. Returns False if the lease is not this session's."""
        if self._grant is None:
            return True  # the grant itself has not arrived yet
        if (peer, message.lease) != (self._peer, self._grant.lease):
            return False
        self._heard_s = time.monotonic()
        if message.kind is Kind.SLOT_FREE:
            if self._slots.free(message.slot):
                self._progress_s = self._heard_s
                self._pump()
        elif message.kind is Kind.DROP:
            self._dropped = True
            self._drop_queue()
        elif message.kind is Kind.STOP:
            self.fail(self._error(f"{self.ticket.receiver.id} stopped the transfer"))
        elif self._failure is None and not self._dropped:
            self._notify(Kind.ALIVE)
        self._say_drained()
        return True

    def tick(self, now_s: float) -> None:
        """Fails the session when writes have not moved for `transfer_timeout_s`."""
        waits = self._slots.any_used and self._failure is None and not self._dropped
        moving = self._writes or waits
        if moving and now_s - self._progress_s > self._config.transfer_timeout_s:
            pending = sum(self._writes.values())
            self.fail(
                self._error(
                    f"no progress for {self._config.transfer_timeout_s:g} s writing to "
                    f"{self.ticket.receiver.id}, {pending} bytes in flight"
                )
            )

    def fail(self, error: TransferError) -> None:
        """Fails the session: nothing more is queued or posted; writes in flight must drain."""
        if self._failure is None:
            self._failure = error
        self._drop_queue()

    # -- inside

    @property
    def _settled(self) -> bool:
        """Returns whether `finish` has its answer."""
        if self._failure is not None:
            return True
        if self._writes or (self._grant is None and not self._dropped):
            return False
        return self._dropped or not self._queue

    async def _open(self) -> None:
        """Does the handshake while compute continues (Tetris figure 7-b)."""
        if self._dropped:
            return
        ask = HandshakeAsk(
            ticket=self.ticket,
            layout=self._layout,
            start_token=self._tokens[0],
            num_tokens=self._tokens[1] - self._tokens[0],
            agent_metadata=self._transport.metadata(),
        )
        try:
            grant = await self._ask(ask)
            if reason := mismatch(self._layout, grant.layout):
                raise self._error(reason)
            self._queue.open(grant)
            if grant.checksums:
                self._sums = self._part_sums(grant)
            self._peer = await outcome(self._transport.connect(grant.agent_metadata))
        except TransferError as error:
            self.fail(error)
        except ValueError as error:
            self.fail(self._error(str(error)))
        else:
            self.timings.granted_s = time.monotonic()
            self._grant = grant
            self._progress_s = self._heard_s = self.timings.granted_s
            self._pump()

    async def _ask(self, ask: HandshakeAsk) -> HandshakeGrant:
        while True:
            self._asks = True
            try:
                grant = await self._control.handshake(
                    ask, timeout_s=self._config.handshake_timeout_s
                )
                self._asks = False
                return grant
            except HandshakeRefused:
                self._asks = False
                raise
            except HandshakeQueued as queued:
                self._answered.set()
                log.debug("%s; asking again", queued)

    def _come_by(self) -> None:
        self._called = False  # first: a layer that is queued from here on wakes the loop again
        self._pump()

    def _pump(self) -> None:
        """Posts the writes that may be posted now."""
        while (
            self._grant is not None
            and self._failure is None
            and not self._dropped
            and self._queue
            and len(self._writes) < MAX_IN_FLIGHT
            and (self._slots.any_free or not self._grant.buffered)
        ):
            if time.monotonic() - self._heard_s > self._grant.lease_s:
                silence = f"no message from {self.ticket.receiver.id} for {self._grant.lease_s:g} s"
                self.fail(self._error(silence))
                return
            slot = self._slots.take() if self._grant.buffered else 0
            try:
                batch = self._queue.take(slot)
            except ValueError as error:  # tokens that are not the sender's
                self.fail(self._error(str(error)))
                return
            if batch is None:  # layers that are not the receiver's
                self._slots.free(slot)
                break
            self._post(batch, slot, self._grant)
        if self._failure is not None or self._dropped:
            self._queue.clear()
        self._changed.set()

    def _post(self, batch: Batch, slot: int, grant: HandshakeGrant) -> None:
        now_s = time.monotonic()
        if not self._writes:
            self._progress_s = now_s
        self.timings.first_write_s = self.timings.first_write_s or now_s
        write = self._write(batch, slot, grant)
        self._writes[write] = batch.runs.total_bytes
        write.add_done_callback(self._on_done)

    def _write(self, batch: Batch, slot: int, grant: HandshakeGrant) -> Future[None]:
        def post(parts: tuple[WrittenRange, ...]) -> Future[None]:
            message = Message(
                kind=Kind.WRITTEN,
                request_id=self.ticket.request_id,
                lease=grant.lease,
                generation=self.ticket.receiver.generation,
                slot=slot,
                parts=parts,
            )
            return self._transport.write(
                self._peer,
                batch.runs,
                message.encode(),
                region=self._outlet.region,
                peer_region=grant.region,
            )

        if self._sums is None:
            return post(batch.parts)
        return self._outlet.summing.summed(self._sums, batch.parts, post)

    def _part_sums(self, grant: HandshakeGrant) -> PartSums:
        """Raises TransferError where the host can't read the pool."""
        pool = self._outlet.pool
        if why := unreadable(pool, self._layout):
            raise self._error(
                f"{self.ticket.receiver.id} has transfer.kv_checksum=on; it must be off where the "
                f"KV pool of a sender {why}"
            )
        return PartSums(pool, self._side, grant.layout, sends=True)

    def _on_done(self, write: Future[None]) -> None:
        """Runs on the transport's thread, or on the loop when a queued write is cancelled.

        Both may run at once: then both may wake the loop, but never neither.
        """
        self._done.append(write)
        if not self._notified:
            self._notified = True
            self._loop.call_soon_threadsafe(self._take_done)

    def _take_done(self) -> None:
        self._notified = False  # first: a write that ends from here on wakes the loop again
        while self._done:
            self._written(self._done.popleft())
        self._say_drained()
        self._changed.set()
        self._pump()

    def _written(self, write: Future[None]) -> None:
        nbytes = self._writes.pop(write)
        if write.cancelled():
            return
        now_s = self._progress_s = time.monotonic()
        if (error := write.exception()) is None:
            self.timings.last_write_s = now_s
            self.timings.bytes += nbytes
            self.timings.writes += 1
        else:
            self.fail(self._error(str(error)))

    def _drop_queue(self) -> None:
        self._queue.clear()
        for write in list(self._writes):
            write.cancel()  # writes that the transport has not posted yet
        self._say_drained()
        self._changed.set()

    def _say_drained(self) -> None:
        """Sends DRAINED once the session is given up and nothing is in flight: nothing will
        follow.
        """
        if (self._failure is not None or self._dropped) and not self._writes:
            self._notify(Kind.DRAINED)

    def _notify(self, kind: Kind) -> None:
        if self._grant is not None:
            message = Message(
                kind=kind,
                request_id=self.ticket.request_id,
                lease=self._grant.lease,
                generation=self.ticket.receiver.generation,
            )
            self._transport.notify(self._peer, message.encode())

    def _error(self, text: str) -> TransferError:
        return TransferError(f"request {self.ticket.request_id}: {text}")

    async def _tell_finish(self, message: Any) -> None:  # noqa: ANN401 - the wire's type
        if self._dropped or self._failure is not None:
            return
        try:
            await self._control.finish(
                self.ticket, message, timeout_s=self._config.transfer_timeout_s
            )
        except TransferError as error:
            if not self._dropped:
                self.fail(error)

    async def _tell_abort(self, reason: str, *, drained: bool) -> bool:
        """Returns whether the receiver has answered."""
        try:
            await self._say_abort(reason, drained=drained)
        except TransferError as error:
            log.debug("%s did not get the abort: %s", self.ticket.receiver.id, error)
            return False
        return True

    async def _say_abort(self, reason: str, *, drained: bool) -> None:
        await self._control.abort(
            self.ticket, reason=reason, drained=drained, timeout_s=ABORT_TIMEOUT_S
        )

    async def _end(self) -> None:
        self._over = True
        try:
            await cancel(self._opening)
        finally:  # `finish` may be cancelled here, at its very end
            self._on_over(self)
