"""One resumable stream that this replica generates.

Its request goes on without its client. Once a second the owner renews its lease and hears whether a
client still wants the stream, here or at another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial

from prometheus_client import Counter

from millrace.core.request import RequestState
from millrace.proxy.errors import ApiError, unavailable
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.fleet.leftovers import Leftovers
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.reply import EventReply
from millrace.proxy.streams import lives
from millrace.proxy.streams.lives import StreamLives
from millrace.proxy.streams.rewriting import Rewriting, journal_tokens
from millrace.proxy.streams.source import StreamState, error_document
from millrace.proxy.tracing.handed_on import StreamWaterfalls
from millrace.state.store import IdTaken, RequestStore, StoreError
from millrace.state.streams import Hold, Lease, StreamStore

log = logging.getLogger(__name__)

#: The journal may lack so many of an answer's last tokens while the store answers.
MOST_LAST_TOKENS = 4096

AWAY = "The store of streams does not answer."


@dataclass(frozen=True, slots=True)
class Shared:
    """What the streams of a replica share."""

    store: StreamStore
    requests: RequestStore
    lives: StreamLives
    waterfalls: StreamWaterfalls
    counter: Counter
    leftovers: Leftovers = field(default_factory=Leftovers)

    def count(self, event: str) -> None:
        self.counter.labels(event).inc()

    def free(self, stream_id: str, fence: int, source: bytes) -> None:
        """Removes a stream that was refused: its client may send the request again with its id."""
        self.leftovers.add(stream_id, partial(self.store.delete, stream_id, fence, source))

    async def complete_journal(self, incarnation: str, request: ProxyRequest) -> None:
        """Writes the last tokens of a request, which its instance may have died with. Raises
        StoreError.
        """
        first = max(request.completion_tokens - MOST_LAST_TOKENS, 0)
        await journal_tokens(self.requests, incarnation, request, first)


class OwnedStream:
    """A stream that this replica generates."""

    def __init__(
        self,
        shared: Shared,
        stream_id: str,
        tenant: str,
        source: bytes,
        fence: int,
        reply: EventReply,
        incarnation: str,
        gateway: Gateway,
    ) -> None:
        """`incarnation` is the id under which the store has its request; `gateway` runs it."""
        self._shared = shared
        self._gateway = gateway
        self.stream_id = stream_id
        self._tenant = tenant
        self._source = source
        self._fence = fence
        self._incarnation = incarnation
        self.reply = reply
        #: Whether a client of this replica reads the reply itself.
        self.attached = False
        self._ended = asyncio.Event()
        self._writing = asyncio.Lock()  # of what the store has of the stream
        self._written = False  # the store has the end, and with it the last state
        self._settled = False  # nothing is left to write
        self._rewriting = Rewriting(shared.requests)
        self._renewed = ""  # the incarnation whose record lives on without this replica
        self._lives_until_s = time.monotonic() + shared.lives.ttl_s
        self.request.on_recorded = self._recorded

    @property
    def request(self) -> ProxyRequest:
        return self.reply.progress.requests[0]

    @property
    def handed_on(self) -> bool:
        """Whether another replica continues it, or may do so. Known when `run` has ended."""
        return not self._fence

    @property
    def state(self) -> StreamState:
        cached = self.request.fixed_cached_tokens
        if self.request.has_begun:
            cached = self.request.cached_tokens
        return StreamState(incarnation=self._incarnation, cached_tokens=cached)

    async def save(self) -> None:
        """Writes the state and renews the lease. Raises ApiError: 503, or 409 if fenced off."""
        try:
            hold = await self._renew(lives.LEASE_S)
        except StoreError as error:
            raise unavailable(AWAY) from error
        if hold is Hold.LOST:
            raise _fenced_off()

    async def save_begin(self) -> None:
        """Writes the number of cached tokens, which a replay needs, before the first event is sent.

        A store that does not answer ends no answer: the next renewal writes it. Raises ApiError
        (409) if fenced off.
        """
        try:
            await self.save()
        except ApiError as error:
            if not error.is_refusal:
                raise
            log.warning("stream %s: its begin is not in the store yet", self.stream_id)

    def leave(self) -> None:
        """The client of this replica has left, or has the whole answer."""
        self.attached = False
        self.settle()

    def settle(self) -> bool:
        """Writes the end of a stream that has ended; returns whether it has."""
        if self.reply.progress.finished:
            self._ended.set()
        return self._ended.is_set()

    async def run(self) -> None:
        """Keeps the stream until its end."""
        progress = self.reply.progress
        while not progress.finished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lives.RENEW_S):
                    await self._ended.wait()
            if not self.attached:
                self.reply.take()  # a client that comes back reads a replay
            if not progress.finished:
                await self.keep()
        await self._finish()

    async def release(self) -> None:
        """Lets another replica adopt the stream at once; this replica ends its work."""
        if self.settle():
            return
        await self._shared.waterfalls.hand_on(self.stream_id, self.request, lives.CLOSE_S / 2)
        try:
            await self._renew(0.0)
        except StoreError as error:
            log.warning("stream %s was not released: %s", self.stream_id, error)
        self._shared.count("released")
        self._cut_off(unavailable("The server is shutting down; the stream can be resumed."))

    async def keep(self) -> None:
        """Renews the lease; ends the work for a stream of another replica or without a client."""
        try:
            hold = await self._renew(lives.LEASE_S)
        except StoreError as error:
            log.warning("stream %s: %s", self.stream_id, error)
            return
        if hold is Hold.LOST:
            log.warning("stream %s is continued by another replica", self.stream_id)
            self._shared.count("fenced")
            self._cut_off(_fenced_off())
        elif hold in (Hold.UNWANTED, Hold.GONE):
            self._shared.count("expired")
            self._gateway.leave(self.request, "expired")
            expired = ApiError(410, "No client has read the stream for too long.", code="expired")
            self.reply.progress.fail(expired)

    def _cut_off(self, error: ApiError) -> None:
        self._gateway.abandon(self.request)
        self._fence = 0  # no change of this replica counts any more
        self.reply.progress.fail(error)
        self._ended.set()

    async def _recorded(self) -> None:
        self._incarnation = self.request.spec.request_id
        await self.save()

    async def _renew(self, held_s: float) -> Hold:
        wanted_s = self._shared.lives.grace_s if self.attached else 0.0
        lease = Lease(held_s=held_s, wanted_s=wanted_s)
        async with self._writing:
            if self._written:  # a final stream takes no renewal, from its owner neither
                return Hold.HELD
            body = self.state.encoded()
            hold = await self._shared.store.renew(self.stream_id, self._fence, body, lease)
            if hold is Hold.GONE and (self.attached or time.monotonic() < self._lives_until_s):
                hold = await self._restore(body, held_s)
            elif hold is Hold.HELD:
                await self._rewriting.follow(self.request)
            if hold is Hold.HELD and self._renewed != self._incarnation:
                await self._shared.requests.renew([self._incarnation])
                self._renewed = self._incarnation
        if hold is not Hold.LOST:
            self._shared.waterfalls.note(self.stream_id, self.request)
        return hold

    async def _restore(self, body: bytes, held_s: float) -> Hold:
        """Records the stream again, which the store has lost with its data, and its request before
        it; unless a replica has recorded another stream of its id since.

        It was wanted at the renewal before: its client has the whole grace time to come back.
        """
        shared = self._shared
        progress, final = self.reply.progress, None
        if progress.finished:
            final = RequestState.FINISHED if progress.error is None else RequestState.FAILED
        await self._rewriting.begin(self.request, final)
        self._renewed = ""
        try:
            await shared.store.create(
                self.stream_id,
                tenant=self._tenant,
                source=self._source,
                body=body,
                lease=Lease(held_s=held_s, wanted_s=shared.lives.grace_s),
                ttl_s=shared.lives.ttl_s,
                fence=self._fence,
            )
        except IdTaken:
            return Hold.LOST
        log.warning("stream %s: the store had lost it, and has it again", self.stream_id)
        shared.count("restored")
        return Hold.HELD

    async def finish_late(self) -> None:
        """Writes the end that the store did not take, as soon as it answers; a stream that it has
        lost with its data, too. For as long as it would have kept the end.
        """
        until_s = time.monotonic() + self._shared.lives.finished_ttl_s
        while not self._settled and time.monotonic() < until_s:
            await asyncio.sleep(lives.RENEW_S)
            await self._finish()

    async def _finish(self) -> None:
        """Writes the end, unless another replica continues the stream."""
        try:
            if self._fence:
                await self._write_end()
        except StoreError as away:
            log.warning("stream %s: its end is not in the store yet: %s", self.stream_id, away)
        else:
            self._settled = True

    async def _write_end(self) -> None:
        error = self.reply.progress.error
        state = self.state
        if error is not None:
            state = replace(state, error=error_document(error))
        if error is not None and error.is_refusal and not self.request.has_begun:
            self._shared.free(self.stream_id, self._fence, self._source)
            return
        ttl_s = self._shared.lives.finished_ttl_s
        store, body = self._shared.store, state.encoded()
        await self._shared.complete_journal(self._incarnation, self.request)
        finish = partial(store.finish, self.stream_id, self._fence, body, ttl_s)
        async with self._writing:
            self._written = self._written or await finish()
        if not self._written and await self._renew(lives.LEASE_S) is Hold.HELD:  # it was lost
            async with self._writing:
                self._written = await finish()
        if self._written:
            await self._shared.requests.release(self._incarnation)
        else:
            self._fence = 0


def _fenced_off() -> ApiError:
    return ApiError(409, "Another replica continues the stream.", code="continued_elsewhere")
