"""The resumable streams that this replica generates: their leases, their ends and their adoption.

A stream's request goes on without its client. Once a second its owner renews its lease and hears
whether a client still wants the stream, here or at another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from millrace.concurrency import cancel
from millrace.core.request import RequestState
from millrace.proxy.errors import ApiError, id_taken, unavailable
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.fleet.leftovers import Leftovers
from millrace.proxy.generation.adoption import Adoption
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.models.models import Models
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.reply.reply import EventReply
from millrace.proxy.streams.lives import StreamLives
from millrace.proxy.streams.replay import Replays, is_left_over, rebuilt
from millrace.proxy.streams.rewriting import Rewriting
from millrace.proxy.streams.source import (
    StreamSource,
    StreamState,
    admission_of,
    error_document,
    read_source,
    read_state,
)
from millrace.proxy.tenancy.caller import Caller
from millrace.proxy.tenancy.costs import used_cost
from millrace.proxy.tenancy.exchange import Exchange
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tracing.handed_on import StreamWaterfalls
from millrace.state.store import IdTaken, JournalEntry, RequestStore, StoreError
from millrace.state.streams import (
    Hold,
    Lease,
    StreamRecord,
    StreamStore,
    new_fence,
    owner_number,
)

log = logging.getLogger(__name__)

RENEW_S = 1.0
#: A stream without a renewal for this long may be adopted by another replica.
LEASE_S = 5.0
#: The same without a renewal for this long, if the stream's request has ended: the scheduler
#: cancels it when the connection of the stream's proxy ends.
QUIET_S = 2.0
#: Time to release the streams at shutdown. A stream that is not released is lost with its lease.
CLOSE_S = 2.0

#: The journal may lack so many of an answer's last tokens while the store answers.
MOST_LAST_TOKENS = 4096

#: An owner that lives notices within this time that the store has lost a stream, and restores it.
RESTORED_S = 3 * RENEW_S

_AWAY = "The store of streams does not answer."


class OwnedStream:
    """A stream that this replica generates."""

    def __init__(
        self,
        streams: OwnedStreams,
        stream_id: str,
        tenant: str,
        source: bytes,
        fence: int,
        reply: EventReply,
        incarnation: str,
        gateway: Gateway,
    ) -> None:
        """`incarnation` is the id under which the store has its request; `gateway` runs it."""
        self._streams = streams
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
        self._rewriting = Rewriting(streams.requests)
        self._lives_until_s = time.monotonic() + streams.lives.ttl_s
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
            hold = await self._renew(LEASE_S)
        except StoreError as error:
            raise unavailable(_AWAY) from error
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
                async with asyncio.timeout(RENEW_S):
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
        await self._streams.waterfalls.hand_on(self.stream_id, self.request, CLOSE_S / 2)
        try:
            await self._renew(0.0)
        except StoreError as error:
            log.warning("stream %s was not released: %s", self.stream_id, error)
        self._streams.count("released")
        self._cut_off(unavailable("The server is shutting down; the stream can be resumed."))

    async def keep(self) -> None:
        """Renews the lease; ends the work for a stream of another replica or without a client."""
        try:
            hold = await self._renew(LEASE_S)
        except StoreError as error:
            log.warning("stream %s: %s", self.stream_id, error)
            return
        if hold is Hold.LOST:
            log.warning("stream %s is continued by another replica", self.stream_id)
            self._streams.count("fenced")
            self._cut_off(_fenced_off())
        elif hold in (Hold.UNWANTED, Hold.GONE):
            self._streams.count("expired")
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
        wanted_s = self._streams.lives.grace_s if self.attached else 0.0
        lease = Lease(held_s=held_s, wanted_s=wanted_s)
        async with self._writing:
            if self._written:  # a final stream takes no renewal, from its owner neither
                return Hold.HELD
            body = self.state.encoded()
            hold = await self._streams.store.renew(self.stream_id, self._fence, body, lease)
            if hold is Hold.GONE and (self.attached or time.monotonic() < self._lives_until_s):
                hold = await self._restore(body, held_s)
            elif hold is Hold.HELD:
                await self._rewriting.follow(self.request)
        if hold is not Hold.LOST:
            self._streams.waterfalls.note(self.stream_id, self.request)
        return hold

    async def _restore(self, body: bytes, held_s: float) -> Hold:
        """Records the stream again, which the store has lost with its data, and its request before
        it; unless a replica has recorded another stream of its id since.

        It was wanted at the renewal before: its client has the whole grace time to come back.
        """
        streams = self._streams
        progress, final = self.reply.progress, None
        if progress.finished:
            final = RequestState.FINISHED if progress.error is None else RequestState.FAILED
        await self._rewriting.begin(self.request, final)
        try:
            await streams.store.create(
                self.stream_id,
                tenant=self._tenant,
                source=self._source,
                body=body,
                lease=Lease(held_s=held_s, wanted_s=streams.lives.grace_s),
                ttl_s=streams.lives.ttl_s,
                fence=self._fence,
            )
        except IdTaken:
            return Hold.LOST
        log.warning("stream %s: the store had lost it, and has it again", self.stream_id)
        streams.count("restored")
        return Hold.HELD

    async def _finish(self) -> None:
        if not self._fence:
            return
        error = self.reply.progress.error
        state = self.state
        if error is not None:
            state = replace(state, error=error_document(error))
        if error is not None and error.is_refusal and not self.request.has_begun:
            self._streams.free(self.stream_id, self._fence, self._source)
            return
        ttl_s = self._streams.lives.finished_ttl_s
        store, body = self._streams.store, state.encoded()
        try:
            await self._streams.complete_journal(self._incarnation, self.request)
            finish = partial(store.finish, self.stream_id, self._fence, body, ttl_s)
            async with self._writing:
                self._written = await finish()
            if not self._written and await self._renew(LEASE_S) is Hold.HELD:  # it was lost
                async with self._writing:
                    self._written = await finish()
            if self._written:
                await self._streams.release(self._incarnation)
            else:
                self._fence = 0
        except StoreError as away:
            log.warning("stream %s was not finished: %s", self.stream_id, away)


class OnEnd(Protocol):
    """Is called when this replica no longer generates a stream."""

    def __call__(self, *, handed_on: bool) -> None: ...


class OwnedStreams:
    """All streams that this replica generates, by id."""

    def __init__(
        self,
        store: StreamStore,
        requests: RequestStore,
        models: Models,
        replays: Replays,
        metrics: ProxyMetrics,
        lives: StreamLives,
        limiter: Limiter,
        waterfalls: StreamWaterfalls,
    ) -> None:
        self.store = store
        self.waterfalls = waterfalls
        self._limiter = limiter
        self._models = models
        self.lives = lives
        self.requests = requests
        self._replays = replays
        self._counter = metrics.streams
        self._leftovers = Leftovers()
        self._streams: dict[str, OwnedStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()  # ids of streams that may still be refused

    def count(self, event: str) -> None:
        self._counter.labels(event).inc()

    def find(self, stream_id: str) -> OwnedStream | None:
        """Returns the stream if this replica generates it."""
        return self._streams.get(stream_id)

    async def start(
        self,
        source: StreamSource,
        model: ServedModel,
        tenant: str,
        reply: EventReply,
        on_end: OnEnd,
    ) -> OwnedStream:
        """Records a stream and submits its request. Raises ApiError (503, 429, 409)."""
        request, stream_id, gateway = reply.progress.requests[0], source.response_id, model.gateway
        with self._undecided(stream_id):
            if not await self._is_free(stream_id):
                raise id_taken()
            encoded, fence = source.encoded(), new_fence()
            stream = OwnedStream(self, stream_id, tenant, encoded, fence, reply, stream_id, gateway)
            stream.attached = True
            create = partial(
                self.store.create,
                stream_id,
                tenant=tenant,
                source=encoded,
                body=StreamState(incarnation=stream_id).encoded(),
                lease=Lease(held_s=LEASE_S, wanted_s=self.lives.grace_s),
                ttl_s=self.lives.ttl_s,
                fence=fence,
            )
            try:
                await self._leftovers.create(stream_id, create)
                await gateway.submit(request)
            except IdTaken as error:
                raise id_taken() from error
            except BaseException as error:  # of a client that leaves meanwhile, too
                gateway.leave(request, "refused")
                self.free(stream_id, fence, encoded)
                if isinstance(error, StoreError):
                    raise unavailable(_AWAY) from error
                raise
            self.count("started")
            self._keep(stream, on_end)
            return stream

    @contextlib.contextmanager
    def _undecided(self, stream_id: str) -> Iterator[None]:
        """Refuses others of this id in the block, for now: the first may still be refused, too."""
        if stream_id in self._starting:
            raise unavailable("Another request with this id is not accepted yet.")
        self._starting.add(stream_id)
        try:
            yield
        finally:
            self._starting.discard(stream_id)

    async def _is_free(self, stream_id: str) -> bool:
        """Whether this replica generates no stream of this id. The store does not tell: it may have
        lost its data since. Waits for the end of one that has failed.
        """
        task = self._tasks.get(stream_id)
        if task is None:
            return True
        if not self._streams[stream_id].settle():
            return False
        await asyncio.wait([task])
        return stream_id not in self._tasks

    def free(self, stream_id: str, fence: int, source: bytes) -> None:
        """Removes a stream that was refused: its client may send the request again with its id."""
        self._leftovers.add(stream_id, partial(self.store.delete, stream_id, fence, source))

    async def complete_journal(self, incarnation: str, request: ProxyRequest) -> None:
        """Writes the last tokens of a request, which its instance may have died with. Raises
        StoreError.
        """
        first = max(request.completion_tokens - MOST_LAST_TOKENS, 0)
        if tokens := request.emitted_after(first):
            entry = JournalEntry(request_id=incarnation, choice=0, start=first, token_ids=tokens)
            await self.requests.append_tokens([entry])

    async def release(self, incarnation: str) -> None:
        """Releases the record of an ended stream's request. Raises StoreError."""
        await self.requests.release(incarnation)

    async def adopt_if_lost(self, stream_id: str, record: StreamRecord) -> bool:
        """Continues a stream whose owner has died, unless another replica is faster. Returns False
        if the owner lives.

        Raises StoreError, and ApiError (404) if this replica does not serve its model.
        """
        left_s = 0.0 if record.lost else LEASE_S - QUIET_S
        if record.final or record.left_s > left_s:
            return False
        if not record.lost and not await is_left_over(self._replays, self.requests, record):
            return False
        await self._adopt(stream_id, record, left_s)
        return True

    async def _adopt(self, stream_id: str, record: StreamRecord, left_s: float) -> None:
        """Adopts a stream whose lease expires within `left_s`."""
        if await self._holds(stream_id):
            return
        lease = Lease(held_s=LEASE_S, wanted_s=self.lives.grace_s)
        source = read_source(record.source)
        gateway = self._models.of_stream(source.model).gateway
        if gateway.draining or not await self.store.adopt(
            stream_id, record.fence, lease, left_s=left_s
        ):
            return
        fence = record.fence + 1
        latest = await self.store.get(stream_id)  # the former owner may have changed it meanwhile
        if latest is None or latest.fence != fence:
            return
        state = read_state(latest.body)
        replay = await rebuilt(self._replays, self.requests, source, state)
        if replay is None:
            error = ApiError(500, "The stream's request is lost.", code="failed")
            body = StreamState(incarnation=state.incarnation, error=error_document(error))
            ttl_s = self.lives.finished_ttl_s
            await self.store.finish(stream_id, fence, body.encoded(), ttl_s)
            return
        self.count("adopted")
        former = await self.waterfalls.former(stream_id)
        replay.request.adoption = Adoption(
            at=time.monotonic(), tokens=replay.token_count, former=former
        )
        stream = OwnedStream(
            *(self, stream_id, record.tenant, record.source, fence),
            *(replay.reply, state.incarnation, gateway),
        )
        if replay.finished:
            await self.requests.finish(state.incarnation, RequestState.FINISHED.value)
            await self.requests.release(state.incarnation)
        else:
            log.info("stream %s is adopted after %d tokens", stream_id, replay.token_count)
            replay.request.fixed_cached_tokens = state.cached_tokens
            replay.request.lineage = f"{stream_id}.{owner_number(fence)}"
            gateway.adopt(replay.request, state.incarnation)
        self._keep(stream, self._holding(stream, source, record.tenant))

    async def _holds(self, stream_id: str) -> bool:
        """Whether this replica generates the stream, after all; renews its lease."""
        stream, task = self._streams.get(stream_id), self._tasks.get(stream_id)
        if stream is None or task is None:
            return False
        if not stream.settle():
            await stream.keep()
        if not stream.settle():
            return True
        await asyncio.wait([task])
        return False

    async def close(self) -> None:
        """Releases all streams, so that other replicas continue them."""
        releases = [asyncio.create_task(one.release()) for one in self._streams.values()]
        if waiting := [*releases, *self._tasks.values()]:
            await asyncio.wait(waiting, timeout=CLOSE_S)
        await cancel(*self._tasks.values())
        await self.waterfalls.close(CLOSE_S)
        await self._leftovers.close(CLOSE_S)
        await self.store.close()

    def _holding(self, stream: OwnedStream, source: StreamSource, tenant: str) -> OnEnd:
        """Holds what an adopted stream's request has reserved, and returns what settles it."""
        exchange = Exchange(
            caller=Caller(tenant=tenant),
            arrived_at=time.monotonic(),
            admission=admission_of(source),
        )
        self._limiter.adopt(exchange)

        def end(*, handed_on: bool) -> None:
            if handed_on:
                self._limiter.hand_on(exchange)
                return
            error = stream.reply.progress.error
            self._limiter.settle(exchange, used_cost([stream.request], error))
            self.waterfalls.keep(stream.request, "" if error is None else error.message)

        return end

    def _keep(self, stream: OwnedStream, on_end: OnEnd) -> None:
        task = asyncio.create_task(stream.run())
        self._streams[stream.stream_id], self._tasks[stream.stream_id] = stream, task

        def ended(task: asyncio.Task[None]) -> None:
            del self._streams[stream.stream_id], self._tasks[stream.stream_id]
            on_end(handed_on=stream.handed_on)
            self.waterfalls.leave(stream.stream_id, handed_on=stream.handed_on)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("stream %s", stream.stream_id, exc_info=error)

        task.add_done_callback(ended)


def _fenced_off() -> ApiError:
    return ApiError(409, "Another replica continues the stream.", code="continued_elsewhere")
