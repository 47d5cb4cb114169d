"""The resumable streams that this replica generates: their begin, their adoption, their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from millrace.concurrency import cancel
from millrace.core.request import RequestState
from millrace.proxy.errors import ApiError, id_taken, unavailable
from millrace.proxy.generation.adoption import Adoption
from millrace.proxy.models.models import Models
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.reply.reply import EventReply
from millrace.proxy.streams import lives
from millrace.proxy.streams.owned_stream import AWAY, OwnedStream, Shared
from millrace.proxy.streams.replay import Replays, is_left_over, rebuilt
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
from millrace.state.store import IdTaken, StoreError
from millrace.state.streams import Lease, StreamRecord, new_fence, owner_number

log = logging.getLogger(__name__)


class OnEnd(Protocol):
    """Is called when this replica no longer generates a stream."""

    def __call__(self, *, handed_on: bool) -> None: ...


class OwnedStreams:
    """All streams that this replica generates, by id."""

    def __init__(self, shared: Shared, models: Models, replays: Replays, limiter: Limiter) -> None:
        self.shared = shared
        self._limiter = limiter
        self._models = models
        self._replays = replays
        self._streams: dict[str, OwnedStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()  # ids of streams that may still be refused

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
            stream = OwnedStream(
                self.shared, stream_id, tenant, encoded, fence, reply, stream_id, gateway
            )
            stream.attached = True
            create = partial(
                self.shared.store.create,
                stream_id,
                tenant=tenant,
                source=encoded,
                body=StreamState(incarnation=stream_id).encoded(),
                lease=Lease(held_s=lives.LEASE_S, wanted_s=self.shared.lives.grace_s),
                ttl_s=self.shared.lives.ttl_s,
                fence=fence,
            )
            try:
                await self.shared.leftovers.create(stream_id, create)
                await gateway.submit(request)
            except IdTaken as error:
                raise id_taken() from error
            except BaseException as error:  # of a client that leaves meanwhile, too
                gateway.leave(request, "refused")
                self.shared.free(stream_id, fence, encoded)
                if isinstance(error, StoreError):
                    raise unavailable(AWAY) from error
                raise
            self.shared.count("started")
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
        return not await self._goes_on(stream_id)

    async def adopt_if_lost(self, stream_id: str, record: StreamRecord) -> bool:
        """Continues a stream whose owner has died, unless another replica is faster. Returns False
        if the owner lives.

        Raises StoreError, and ApiError (404) if this replica does not serve its model.
        """
        left_s = 0.0 if record.lost else lives.LEASE_S - lives.QUIET_S
        if record.final or record.left_s > left_s:
            return False
        if not record.lost and not await is_left_over(self._replays, self.shared.requests, record):
            return False
        await self._adopt(stream_id, record, left_s)
        return True

    async def _adopt(self, stream_id: str, record: StreamRecord, left_s: float) -> None:
        """Adopts a stream whose lease expires within `left_s`."""
        if await self._holds(stream_id):
            return
        lease = Lease(held_s=lives.LEASE_S, wanted_s=self.shared.lives.grace_s)
        source = read_source(record.source)
        gateway = self._models.of_stream(source.model).gateway
        if gateway.draining or not await self.shared.store.adopt(
            stream_id, record.fence, lease, left_s=left_s
        ):
            return
        fence = record.fence + 1
        # The former owner may have changed it meanwhile.
        latest = await self.shared.store.get(stream_id)
        if latest is None or latest.fence != fence:
            return
        state = read_state(latest.body)
        replay = await rebuilt(self._replays, self.shared.requests, source, state, latest.age_s)
        if replay is None:
            await self._end_lost(stream_id, latest, state)
            return
        self.shared.count("adopted")
        former = await self.shared.waterfalls.former(stream_id)
        replay.request.adoption = Adoption(
            at=time.monotonic(), tokens=replay.token_count, former=former
        )
        stream = OwnedStream(
            *(self.shared, stream_id, record.tenant, record.source, fence),
            *(replay.reply, state.incarnation, gateway),
        )
        if replay.finished:
            await self.shared.requests.finish({state.incarnation: RequestState.FINISHED.value})
            await self.shared.requests.release(state.incarnation)
        else:
            log.info("stream %s is adopted after %d tokens", stream_id, replay.token_count)
            replay.request.fixed_cached_tokens = state.cached_tokens
            replay.request.lineage = f"{stream_id}.{owner_number(fence)}"
            gateway.adopt(replay.request, state.incarnation)
        self._keep(stream, self._holding(stream, source, record.tenant))

    async def _end_lost(self, stream_id: str, record: StreamRecord, state: StreamState) -> None:
        """Ends an adopted stream whose request can't go on: by an error; or, before its first event
        and without a request in the store, by its removal. Its former owner has refused it then,
        and has not removed it yet.
        """
        store, requests = self.shared.store, self.shared.requests
        if state.cached_tokens is None and await requests.get(state.incarnation) is None:
            await store.delete(stream_id, record.fence, record.source)
            return
        error = ApiError(500, "The stream's request is lost.", code="failed")
        body = StreamState(incarnation=state.incarnation, error=error_document(error))
        ttl_s = self.shared.lives.finished_ttl_s
        await store.finish(stream_id, record.fence, body.encoded(), ttl_s)

    async def _holds(self, stream_id: str) -> bool:
        """Whether this replica generates the stream, after all; renews its lease."""
        stream = self.find(stream_id)
        if stream is not None and not stream.settle():
            await stream.keep()
        return await self._goes_on(stream_id)

    async def _goes_on(self, stream_id: str) -> bool:
        """Whether this replica generates the stream, or can't write its end: the store is away."""
        task = self._tasks.get(stream_id)
        if task is not None and self._streams[stream_id].settle():
            await asyncio.wait([task], timeout=lives.RENEW_S)
        return stream_id in self._tasks

    async def close(self) -> None:
        """Releases all streams, so that other replicas continue them."""
        releases = [asyncio.create_task(one.release()) for one in self._streams.values()]
        if waiting := [*releases, *self._tasks.values()]:
            await asyncio.wait(waiting, timeout=lives.CLOSE_S)
        await cancel(*self._tasks.values())
        await self.shared.waterfalls.close(lives.CLOSE_S)
        await self.shared.leftovers.close(lives.CLOSE_S)
        await self.shared.store.close()

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
            self.shared.waterfalls.keep(stream.request, "" if error is None else error.message)

        return end

    def _keep(self, stream: OwnedStream, on_end: OnEnd) -> None:
        task = asyncio.create_task(self._run(stream, on_end))
        self._streams[stream.stream_id], self._tasks[stream.stream_id] = stream, task

        def ended(task: asyncio.Task[None]) -> None:
            del self._streams[stream.stream_id], self._tasks[stream.stream_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("stream %s", stream.stream_id, exc_info=error)

        task.add_done_callback(ended)

    async def _run(self, stream: OwnedStream, on_end: OnEnd) -> None:
        try:
            await stream.run()
        finally:
            on_end(handed_on=stream.handed_on)
            self.shared.waterfalls.leave(stream.stream_id, handed_on=stream.handed_on)
        await stream.finish_late()
