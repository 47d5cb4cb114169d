"""The Scheduler gRPC service: turns streams into events, and outboxes into streams.

The loop sees no protobuf, only the core's events and the types of `wire.fleet_messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import grpc

from millrace.concurrency import cancel
from millrace.core.epochs import attempts_before, is_later
from millrace.core.scheduler import effects, events
from millrace.scheduler.loop import AllNamed, SchedulerLoop
from millrace.scheduler.peers import Outbox, Proxy, Worker
from millrace.wire.clients.scheduler_stream import LEADER
from millrace.wire.codec import proxy as proxy_codec
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec import status as status_codec
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.instance import REPORTS
from millrace.wire.codec.status import load_message
from millrace.wire.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

#: Lines of the board that come within this time travel in one message.
BOARD_INTERVAL_S = 0.1

#: No epoch is as far ahead of the time.
_MOST_AHEAD_MS = 24 * 3600 * 1000

M = TypeVar("M")
WorkerContext = grpc.aio.ServicerContext[
    AsyncIterator[scheduler_pb2.WorkerMessage], AsyncIterator[scheduler_pb2.WorkerCommand]
]
ProxyContext = grpc.aio.ServicerContext[
    AsyncIterator[scheduler_pb2.ProxyMessage], AsyncIterator[scheduler_pb2.ProxyUpdate]
]
PolicyContext = grpc.aio.ServicerContext[
    scheduler_pb2.SetPolicyRequest, Awaitable[scheduler_pb2.SetPolicyReply]
]
RateContext = grpc.aio.ServicerContext[
    scheduler_pb2.SetImprovementRateRequest, Awaitable[scheduler_pb2.SetImprovementRateReply]
]
StatusContext = grpc.aio.ServicerContext[
    scheduler_pb2.StatusRequest, Awaitable[scheduler_pb2.StatusReply]
]
LoadContext = grpc.aio.ServicerContext[
    scheduler_pb2.LoadRequest, Awaitable[scheduler_pb2.LoadReply]
]
CordonContext = grpc.aio.ServicerContext[
    scheduler_pb2.SetCordonRequest, Awaitable[scheduler_pb2.SetCordonReply]
]
ExplainContext = grpc.aio.ServicerContext[
    scheduler_pb2.ExplainRequest, Awaitable[scheduler_pb2.Explanation]
]
BoardContext = grpc.aio.ServicerContext[
    scheduler_pb2.WatchBoardRequest, AsyncIterator[scheduler_pb2.BoardLines]
]
EvictContext = grpc.aio.ServicerContext[
    scheduler_pb2.EvictRequest, Awaitable[scheduler_pb2.EvictReply]
]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves streams: a task reads each stream, its handler writes. The first end ends both.

    A scheduler that stands by has no loop yet: it refuses every call, and names the leader.
    """

    def __init__(
        self,
        leader: Callable[[], str] = lambda: "",
        outrun: Callable[[int], None] = lambda seen: None,
    ) -> None:
        """`leader` returns the leader's address, if it is known. `outrun` gets an epoch that a peer
        has seen, and than which the loop's is not later.
        """
        self._leader = leader
        self._outrun = outrun
        self._leading: SchedulerLoop | None = None
        self._connections = count(1)

    def lead(self, loop: SchedulerLoop) -> None:
        """Serves the loop from now on."""
        self._leading = loop

    async def _loop(self, context: grpc.aio.ServicerContext[Any, Any]) -> SchedulerLoop:
        """Returns the loop. Ends a call to a scheduler that stands by: UNAVAILABLE."""
        if self._leading is None:
            leader = self._leader()
            context.set_trailing_metadata(((LEADER, leader),) if leader else ())
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"this scheduler stands by; {leader or 'no scheduler'} leads",
            )
        return self._leading

    async def _check_epoch(
        self, seen: int, loop: SchedulerLoop, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Ends the call of a peer that has `seen` an epoch (0: none) which the loop's does not
        follow: UNAVAILABLE.
        """
        if not seen or seen == loop.epoch or is_later(loop.epoch, seen):
            return
        if seen > loop.epoch + _MOST_AHEAD_MS:
            why = f"seen_epoch is {seen}; no scheduler has had it, for it is more than a day ahead"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        self._outrun(seen)
        why = f"epoch {loop.epoch} is not later than {seen}, which a peer has seen"
        await context.abort(grpc.StatusCode.UNAVAILABLE, why)

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def ConnectWorker(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage],
        context: WorkerContext,
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        loop = await self._loop(context)
        first = await _first(request_iterator, loop)
        if first is None or first.WhichOneof("kind") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker must register first")
        try:
            card = codec.joined(first.register)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"register: {error}")
        await self._check_epoch(first.seen_epoch, loop, context)
        worker = Worker(card=card, address=first.register.address, seen_s=loop.clock())
        loop.saw(first.seen_epoch)
        loop.post_now(card, worker)
        try:
            reading = _read_worker(request_iterator, worker, loop)
            async with contextlib.aclosing(_written(worker.outbox, reading)) as commands:
                async for command in commands:
                    message = codec.command_message(command)
                    message.epoch = loop.epoch
                    yield message
        finally:
            left = events.InstanceLeft(instance_id=worker.id, generation=card.generation)
            loop.post_now(left, worker)
        await _end(context, worker.outbox)

    async def ConnectProxy(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ProxyMessage],
        context: ProxyContext,
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        loop = await self._loop(context)
        first = await _first(request_iterator, loop)
        if first is None or not first.hello.id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a proxy must send hello.id first"
            )
        await self._check_epoch(first.seen_epoch, loop, context)
        proxy = Proxy(key=f"{first.hello.id}#{next(self._connections)}")
        log.info("proxy %s connected", proxy.key)
        loop.saw(first.seen_epoch)
        loop.post_now(None, proxy)
        try:
            reading = _read_proxy(request_iterator, proxy, loop)
            async with contextlib.aclosing(_written(proxy.outbox, reading)) as updates:
                async for update in updates:
                    message = proxy_codec.update_message(update)
                    message.epoch = loop.epoch
                    yield message
        finally:
            log.info("proxy %s left", proxy.key)
            loop.post_now(events.ProxyLeft(proxy_id=proxy.key))
        await _end(context, proxy.outbox)

    async def GetStatus(
        self, request: scheduler_pb2.StatusRequest, context: StatusContext
    ) -> scheduler_pb2.StatusReply:
        loop = await self._loop(context)
        return status_codec.status(loop.machine, loop.addresses, loop.clock())

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: PolicyContext
    ) -> scheduler_pb2.SetPolicyReply:
        loop = await self._loop(context)
        try:
            changed = codec.policy_changed(request)
            weighed = codec.weights_changed(request, loop.machine.weights)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        now = before = loop.machine.policy
        if changed is not None:
            before, now = await loop.set_policy(changed), changed.policy
        if weighed is not None:
            await loop.set_weights(weighed)
        weights = codec.WEIGHTS.encode(loop.machine.weights)
        return scheduler_pb2.SetPolicyReply(before=before, now=now, weights=weights)

    async def SetImprovementRate(
        self, request: scheduler_pb2.SetImprovementRateRequest, context: RateContext
    ) -> scheduler_pb2.SetImprovementRateReply:
        loop = await self._loop(context)
        try:
            changed = codec.improvement_rate_changed(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before, now = await loop.set_improvement_rate(changed)
        return scheduler_pb2.SetImprovementRateReply(before=before, now=now)

    async def GetLoad(
        self, request: scheduler_pb2.LoadRequest, context: LoadContext
    ) -> scheduler_pb2.LoadReply:
        loop = await self._loop(context)
        return load_message(loop.load())

    async def SetCordon(
        self, request: scheduler_pb2.SetCordonRequest, context: CordonContext
    ) -> scheduler_pb2.SetCordonReply:
        loop = await self._loop(context)
        if not await loop.set_cordon(request.instance_id, cordoned=request.cordoned):
            await _unknown(context, request.instance_id)
        return scheduler_pb2.SetCordonReply()

    async def Evict(
        self, request: scheduler_pb2.EvictRequest, context: EvictContext
    ) -> scheduler_pb2.EvictReply:
        loop = await self._loop(context)
        if not await loop.evict(request.instance_id, abort=request.abort):
            await _unknown(context, request.instance_id)
        return scheduler_pb2.EvictReply()

    async def Explain(
        self, request: scheduler_pb2.ExplainRequest, context: ExplainContext
    ) -> scheduler_pb2.Explanation:
        loop = await self._loop(context)
        found = loop.machine.explain(request.request_id, loop.clock())
        if found is None:
            message = f"no request {request.request_id!r} is known, or no longer"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return status_codec.EXPLANATION.encode(found)

    async def WatchBoard(
        self, request: scheduler_pb2.WatchBoardRequest, context: BoardContext
    ) -> AsyncIterator[scheduler_pb2.BoardLines]:
        loop = await self._loop(context)
        feed = loop.board
        outbox = feed.watch(loop.clock())
        try:
            while lines := await outbox.take():
                yield scheduler_pb2.BoardLines(lines=b"".join(lines))
                await asyncio.sleep(BOARD_INTERVAL_S)
        finally:
            feed.leave(outbox)
        await _end(context, outbox)


async def _first(messages: AsyncIterator[M], loop: SchedulerLoop) -> M | None:
    """Returns the stream's first message; None if no message comes within a lease."""
    with contextlib.suppress(StopAsyncIteration, TimeoutError):
        async with asyncio.timeout(loop.config.lease_s):
            return await anext(messages)
    return None


async def _read_worker(
    messages: AsyncIterator[scheduler_pb2.WorkerMessage], worker: Worker, loop: SchedulerLoop
) -> None:
    async for message in messages:
        worker.seen_s = loop.clock()
        report = REPORTS.decode(message)
        if report is None:
            kind = message.WhichOneof("kind")
            raise MessageError(f"a registered worker sent {kind or 'nothing'}")
        await loop.post(
            events.Reported(instance_id=worker.id, generation=worker.card.generation, report=report)
        )


async def _read_proxy(
    messages: AsyncIterator[scheduler_pb2.ProxyMessage], proxy: Proxy, loop: SchedulerLoop
) -> None:
    async for message in messages:
        match message.WhichOneof("kind"):
            case "submit":
                for spec in message.submit.requests:
                    await _submit(spec, proxy, loop)
            case "open":
                await _reopen(message.open, proxy, loop)
            case "all_open":
                loop.post_now(None, AllNamed(proxy))
            case "cancel":
                await loop.post(proxy_codec.cancelled(message.cancel, proxy_id=proxy.key))
            case "load":
                proxy.parked_requests = message.load.parked_requests
            case "keep_traces":
                loop.out.keep_traces(codec.traces_to_keep(message.keep_traces))
            case "ask":
                loop.out.send_progress(proxy, message.ask.request_ids)
            case kind:
                raise MessageError(f"a connected proxy sent {kind or 'nothing'}")


async def _submit(spec: common_pb2.RequestSpec, proxy: Proxy, loop: SchedulerLoop) -> None:
    try:
        request = codec.request(spec, proxy_id=proxy.key, now_s=loop.clock())
    except MessageError as error:
        _refuse(spec, proxy, error)
    else:
        loop.out.traces.submitted(request.id, spec.traceparent, spec.arrival_unix_s)
        await loop.post(events.Submitted(request=request), spec.SerializeToString())


async def _reopen(message: scheduler_pb2.OpenRequest, proxy: Proxy, loop: SchedulerLoop) -> None:
    spec = message.request
    try:
        reopened = replace(
            codec.reopened(message, proxy_id=proxy.key, now_s=loop.clock()),
            attempts=attempts_before(loop.epoch),
        )
    except MessageError as error:
        _refuse(spec, proxy, error)
    else:
        loop.out.traces.submitted(spec.request_id, spec.traceparent, spec.arrival_unix_s)
        await loop.post(reopened, spec.SerializeToString())


def _refuse(spec: common_pb2.RequestSpec, proxy: Proxy, error: MessageError) -> None:
    refused = effects.Refuse(
        request_id=spec.request_id,
        proxy_id=proxy.key,
        code="invalid",
        message=str(error),
        retry_after_s=0.0,
    )
    proxy.outbox.put(refused)


async def _written(
    outbox: Outbox[M], reading: Coroutine[Any, Any, None]
) -> AsyncGenerator[M, None]:
    """Yields the outbox's messages while the peer is read; the end of either ends both."""
    reader = asyncio.create_task(reading)
    reader.add_done_callback(lambda task: _read_end(task, outbox))
    try:
        while messages := await outbox.take():
            for message in messages:
                yield message
    finally:
        outbox.close()
        await cancel(reader)


def _read_end(reader: asyncio.Task[None], outbox: Outbox[Any]) -> None:
    """Closes the outbox; if reading failed, with the error's text."""
    if not reader.cancelled() and (error := reader.exception()) is not None:
        if not isinstance(error, MessageError):
            log.debug("a stream broke: %r", error)
        outbox.close(str(error))
    outbox.close()


async def _end(context: grpc.aio.ServicerContext[Any, Any], outbox: Outbox[Any]) -> None:
    if outbox.failure:
        await context.abort(grpc.StatusCode.UNAVAILABLE, outbox.failure)


async def _unknown(context: grpc.aio.ServicerContext[Any, Any], instance_id: str) -> None:
    message = f"no instance {instance_id!r} is registered"
    await context.abort(grpc.StatusCode.NOT_FOUND, message)
