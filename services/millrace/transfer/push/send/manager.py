"""The sending half of a KV transfer: one manager per prefill instance, one session per receiver."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from millrace.concurrency import cancel
from millrace.core.backoff import Backoff
from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run
from millrace.core.kv.transfer import Ticket
from millrace.transfer.push.checksums import SumThread
from millrace.transfer.push.control import KvPeer, Outlet, Target
from millrace.transfer.push.inbox import Inbox
from millrace.transfer.push.messages import TO_SENDER, Kind, Message
from millrace.transfer.push.send.session import SendSession
from millrace.transfer.push.send.spread_session import SpreadSession
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.layout import Side, shared_layers
from millrace.transfer.transport.regions import Memory, TensorLike

__all__ = ["SendManager", "SendSession", "SpreadSession"]

log = logging.getLogger(__name__)

TICK_S = 0.1

#: Pauses of a call that a receiver has to hear, and when it is given up: the receiver is gone.
REPEAT = Backoff(0.1, 5.0)
REPEATS_FOR_S = 600.0


class SendManager:
    """Opens send sessions. Build it on the running event loop. `storage` is the pool, with the
    shape that `KvLayout` gives.
    """

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
        pool = Memory.of_tensor(storage)
        region = transport.register(pool)
        self._outlet = Outlet(
            transport,
            pool,
            region,
            SumThread("kv-send-sums"),
            self._repeat,
        )
        # by request, attempt and receiver
        self._sessions: dict[tuple[str, int, Incarnation], SendSession] = {}
        self._listening: ExitStack | None = None
        self._inbox = Inbox(transport, TO_SENDER, self._read)
        self._repeating: set[asyncio.Task[None]] = set()  # calls that receivers have to hear
        self._ticker = self._loop.create_task(self._tick_forever())

    @property
    def region(self) -> int:
        """Returns the pool's number at the transport."""
        return self._outlet.region

    @property
    def num_sessions(self) -> int:
        """Returns the number of open sessions: their writes may be in flight."""
        return len(self._sessions)

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
        """Starts a request's handshake and returns at once, so that compute need not wait for it.

        `pages` hold the prompt in token order, or only the tokens of `runs`, a member's share of
        it. A session of an earlier attempt may still drain. Raises TransferError if the attempt has
        a session already or the pages can't hold the tokens.
        """
        target = Target(peer=peer, receiver=receiver, start_token=0, end_token=prompt_tokens)
        self._check_new(request_id, attempt, (target,))
        side = self._side(request_id, pages, prompt_tokens, runs)
        return self._begin(request_id, attempt, side, target, speaks=bool(len(side.starts)))

    async def open_spread(
        self,
        request_id: str,
        targets: Sequence[Target],
        *,
        prompt_tokens: int,
        pages: Sequence[int],
        attempt: int = 1,
        runs: Sequence[Run] | None = None,
    ) -> SpreadSession:
        """Works as `open` for a prompt whose tokens belong at several receivers.

        A receiver gets no session if it shares no layer with this instance, or if there are neither
        tokens nor a message for it. Also raises TransferError when two targets are one receiver, or
        have tokens that are not the prompt's.
        """
        self._check_new(request_id, attempt, targets)
        for one in targets:
            if not 0 <= one.start_token < one.end_token <= prompt_tokens:
                raise TransferError(
                    f"request {request_id}: tokens {one.start_token}..{one.end_token - 1} for "
                    f"{one.receiver[0]} are not in a prompt of {prompt_tokens}"
                )
        side = self._side(request_id, pages, prompt_tokens, runs)
        shares = [
            (one, self._begin(request_id, attempt, side, one))
            for one in targets
            if (one.layers is None or shared_layers(one.layers, self._layout.layers))
            and (one.final_message is not None or side.has_any(one.start_token, one.end_token))
        ]
        return SpreadSession(shares)

    def _check_new(self, request_id: str, attempt: int, targets: Sequence[Target]) -> None:
        receivers = {Incarnation(*one.receiver) for one in targets}
        if any((request_id, attempt, receiver) in self._sessions for receiver in receivers):
            raise TransferError(f"request {request_id} is being sent already")
        if len(receivers) < len(targets):
            raise TransferError(f"request {request_id}: two of its shards are at one receiver")

    def _side(
        self, request_id: str, pages: Sequence[int], prompt_tokens: int, runs: Sequence[Run] | None
    ) -> Side:
        try:
            if runs is None:
                return Side.of(self._layout, pages, prompt_tokens)
            return Side.of_runs(self._layout, pages, runs)
        except ValueError as error:
            raise TransferError(f"request {request_id}: {error}") from error

    def _begin(
        self, request_id: str, attempt: int, side: Side, target: Target, *, speaks: bool = True
    ) -> SendSession:
        ticket = Ticket(
            request_id=request_id,
            sender=self._identity,
            receiver=Incarnation(*target.receiver),
            attempt=attempt,
        )
        session = SendSession(
            ticket=ticket,
            side=side,
            tokens=(target.start_token, target.end_token),
            speaks=speaks,
            peer=target.peer,
            outlet=self._outlet,
            config=self._config,
            on_over=self._on_over,
        )
        self._sessions[request_id, attempt, ticket.receiver] = session
        if self._listening is None:
            self._listening = ExitStack()
            self._listening.enter_context(self._transport.listening())
        return session

    def check_integrity(self) -> None:
        """Raises IntegrityError when a session was left open: call this when idle."""
        if self._sessions or self._listening is not None:
            raise IntegrityError(f"send sessions are still open: {sorted(self._sessions)}")

    async def close(self) -> None:
        """Ends upkeep. All sessions should be over."""
        await cancel(self._ticker, *self._repeating)
        if self._listening is not None:
            self._listening.close()
        await asyncio.to_thread(self._outlet.summing.close)

    def _on_over(self, session: SendSession) -> None:
        ticket = session.ticket
        del self._sessions[ticket.request_id, ticket.attempt, ticket.receiver]
        if not self._sessions and self._listening is not None:
            self._listening.close()
            self._listening = None

    def _repeat(self, call: Callable[[], Awaitable[None]]) -> None:
        repeating = self._loop.create_task(_until_heard(call))
        self._repeating.add(repeating)
        repeating.add_done_callback(self._repeating.discard)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for session in list(self._sessions.values()):
                session.tick(time.monotonic())

    def _read(self, peer: str, message: Message) -> None:
        sessions = [s for (name, *_), s in self._sessions.items() if name == message.request_id]
        # Every session is asked: a session without a grant can't tell whether the message is for
        # it.
        taken = [session.take(peer, message) for session in sessions]
        if any(taken):
            return
        # No session has this lease: nothing is in flight under it, nor ever will be.
        answer = Message(
            kind=Kind.DRAINED,
            request_id=message.request_id,
            lease=message.lease,
            generation=message.generation,
        )
        self._transport.notify(peer, answer.encode())


async def _until_heard(call: Callable[[], Awaitable[None]]) -> None:
    until_s = time.monotonic() + REPEATS_FOR_S
    for failures in itertools.count():
        await asyncio.sleep(REPEAT.pause_s(failures))
        try:
            await call()
        except TransferError as error:
            if time.monotonic() > until_s:
                log.warning("not repeated any more: %s", error)
                return
        else:
            return
