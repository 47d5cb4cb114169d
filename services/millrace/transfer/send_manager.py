"""The sending half of a KV transfer: one manager per prefill instance, one session per request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv_layout import KvLayout
from millrace.core.kv_transfer import Incarnation, Ticket
from millrace.core.sequence_parallel import Run
from millrace.transfer.control import KvPeer, Outlet
from millrace.transfer.inbox import Inbox
from millrace.transfer.layout import Side
from millrace.transfer.memory import Memory, TensorLike
from millrace.transfer.messages import TO_SENDER, Kind, Message
from millrace.transfer.send_session import SendSession
from millrace.transfer.transport import Transport

__all__ = ["SendManager", "SendSession"]

log = logging.getLogger(__name__)

TICK_S = 0.1


class SendManager:
    """Build it on the running event loop. `storage` is the pool, shaped as `KvLayout` says."""

    def __init__(
        self,
        *,
        transport: Transport,
        layout: KvLayout,
        storage: TensorLike,
        identity: tuple[str, int],
        config: TransferConfig,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._identity = Incarnation(*identity)
        self._config = config
        self._loop = asyncio.get_running_loop()
        region = transport.register(Memory.of_tensor(storage))
        # Metadata is asked for once: it may wait for the transport's thread.
        self._outlet = Outlet(transport, region, transport.metadata())
        self._sessions: dict[tuple[str, int], SendSession] = {}  # by request and attempt
        self._listening: ExitStack | None = None
        self._inbox = Inbox(transport, TO_SENDER, self._read)
        self._ticker = self._loop.create_task(self._tick_forever())

    @property
    def region(self) -> int:
        """Of the pool, as the transport counts it."""
        return self._outlet.region

    async def open(
        self,
        request_id: str,
        *,
        peer: KvPeer,
        receiver: tuple[str, int],
        prompt_tokens: int,
        pages: Sequence[int],
        attempt: int = 1,
        runs: Sequence[Run] | None = None,
    ) -> SendSession:
        """Starts a request's handshake and returns at once: compute need not wait for it.

        `pages` hold the prompt, in token order, or just the tokens of `runs`, a member's share
        of it. A session of an earlier attempt may still drain meanwhile. Raises TransferError if
        the attempt has a session already or the pages can't hold the tokens.
        """
        if (request_id, attempt) in self._sessions:
            raise TransferError(f"request {request_id} is being sent already")
        try:
            if runs is None:
                side = Side.of(self._layout, pages, prompt_tokens)
            else:
                side = Side.of_runs(self._layout, pages, runs)
        except ValueError as error:
            raise TransferError(f"request {request_id}: {error}") from error
        session = SendSession(
            ticket=Ticket(
                request_id=request_id,
                sender=self._identity,
                receiver=Incarnation(*receiver),
                attempt=attempt,
            ),
            side=side,
            prompt_tokens=prompt_tokens,
            peer=peer,
            outlet=self._outlet,
            config=self._config,
            on_over=self._on_over,
        )
        self._sessions[request_id, attempt] = session
        if self._listening is None:
            self._listening = ExitStack()
            self._listening.enter_context(self._transport.listening())
        return session

    def check_integrity(self) -> None:
        """Raises IntegrityError when a session was left open: call this when idle."""
        if self._sessions or self._listening is not None:
            raise IntegrityError(f"send sessions are still open: {sorted(self._sessions)}")

    async def close(self) -> None:
        """Ends upkeep. Sessions should be over."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()

    def _on_over(self, session: SendSession) -> None:
        del self._sessions[session.ticket.request_id, session.ticket.attempt]
        if not self._sessions and self._listening is not None:
            self._listening.close()
            self._listening = None

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for session in list(self._sessions.values()):
                session.tick(time.monotonic())

    def _read(self, peer: str, message: Message) -> None:
        sessions = [s for (name, _), s in self._sessions.items() if name == message.request_id]
        if any(session.take(message) for session in sessions):
            return
        # A lease that no session holds: nothing is in flight under it, nor ever will be.
        answer = Message(
            kind=Kind.DRAINED,
            request_id=message.request_id,
            lease=message.lease,
            generation=message.generation,
        )
        self._transport.notify(peer, answer.encode())
