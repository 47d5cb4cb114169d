"""Assigns a receiver's staging buffers to senders and runs the copies out of the buffers."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from millrace.core.config import TransferConfig
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeAsk, HandshakeRefused, Ticket
from millrace.transfer.push.handshake import SLOTS, Lease
from millrace.transfer.push.messages import Message
from millrace.transfer.push.receive.admission import Admission
from millrace.transfer.push.receive.staging import Staging, slot_tokens
from millrace.transfer.push.receive.waiting import BackendQueue
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import layer_token_bytes
from millrace.transfer.transport.regions import Memory


class Buffers:
    """The `transfer.backends` staging buffers of `transfer.buffer_bytes`. Belongs to the event
    loop.
    """

    def __init__(
        self, transport: Transport, pool: Memory, layout: KvLayout, config: TransferConfig
    ) -> None:
        """Raises ConfigError for a pool in memory that the buffers can't serve."""
        self._buffer_bytes = config.buffer_bytes
        self._staging = Staging(
            transport, pool, layout, count=config.backends, buffer_bytes=config.buffer_bytes
        )
        self._queue = BackendQueue(config.backends)

    @property
    def region(self) -> int:
        return self._staging.region

    def offset(self, backend: int) -> int:
        """Returns where a backend's buffer begins in the region, in bytes."""
        return self._staging.offset(backend)

    async def acquire(self, admission: Admission, ask: HandshakeAsk, deadline_s: float) -> int:
        """Waits for the request's turn and returns a backend. Raises HandshakeQueued at the
        deadline.

        Raises HandshakeRefused for a sender whose KV per token is too large for any buffer.
        """
        token_bytes = layer_token_bytes(ask.layout, admission.side.layout)
        if slot_tokens(self._buffer_bytes, token_bytes) < 1:
            raise HandshakeRefused(
                f"transfer.buffer_bytes is {self._buffer_bytes}; it must hold at least "
                f"{SLOTS} tokens of a layer, {SLOTS * token_bytes} bytes"
            )
        if admission.first_ask_s is None:
            admission.first_ask_s = time.monotonic()
        return await self._queue.acquire(
            admission.claim, ask.ticket.sender, admission.first_ask_s, deadline_s
        )

    def scatter(
        self, message: Message, lease: Lease, backend: int, admission: Admission
    ) -> Future[None]:
        """Copies a slot's parts into the pages. The future is done when the slot may be written
        again.
        """
        return self._staging.scatter(message, backend, lease.layout, admission.side)

    def done(self, admission: Admission, whose: Lease | Ticket) -> None:
        """Frees a sender's buffer, which no write can reach any more."""
        self._queue.done(admission.claim_of(whose.attempt), whose.sender)

    def end(self, claim: str) -> None:
        """Ends an attempt; the attempt's senders that still wait are refused."""
        self._queue.end(claim)

    def check_integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError when a backend is lost, or with `idle` when one is in use."""
        self._queue.check_integrity(idle=idle)

    async def close(self) -> None:
        await asyncio.to_thread(self._staging.close)
