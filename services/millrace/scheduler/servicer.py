"""The Scheduler gRPC service: turns streams into events, and outboxes into streams.

The loop sees no protobuf, only the core's events and the types of `wire.fleet_messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from itertools import count
from typing import Any, TypeVar

import grpc

from millrace.core.scheduler import effects, events
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.peers import Outbox, Proxy, Worker
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
    """Serves streams: a task reads each stream, its handler writes. The first end ends both."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self._loop = loop
        self._connections = count(1)

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def ConnectWorker(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage],
        context: WorkerContext,
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        first = await self._first(request_iterator)
        if first is None or first.WhichOneof("kind") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker must register first")
        try:
            card = codec.joined(first.register)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"register: {error}")
        worker = Worker(card=card, address=first.register.address, seen_s=self._loop.clock())
        self._loop.post_now(card, worker)
        try:
            reading = self._read_worker(request_iterator, worker)
            async with contextlib.aclosing(_written(worker.outbox, reading)) as commands:
                async for command in commands:
                    yield codec.command_message(command)
        finally:
            left = events.InstanceLeft(instance_id=worker.id, generation=card.generation)
            self._loop.post_now(left, worker)
        await _end(context, worker.outbox)

    async def _read_worker(
        self, messages: AsyncIterator[scheduler_pb2.WorkerMessage], worker: Worker
    ) -> None:
        async for message in messages:
            worker.seen_s = self._loop.clock()
            report = REPORTS.decode(message)
            if report is None:
                raise MessageError(
                    f"a registered worker sent {message.WhichOneof('kind') or 'nothing'}"
                )
            await self._loop.post(
                events.Reported(
                    instance_id=worker.id, generation=worker.card.generation, report=report
                )
            )

    async def ConnectProxy(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ProxyMessage],
        context: ProxyContext,
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        first = await self._first(request_iterator)
        if first is None or not first.hello.id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a proxy must send hello.id first"
            )
        proxy = Proxy(key=f"{first.hello.id}#{next(self._connections)}")
        log.info("proxy %s connected", proxy.key)
        self._loop.post_now(None, proxy)
        try:
            reading = self._read_proxy(request_iterator, proxy)
            async with contextlib.aclosing(_written(proxy.outbox, reading)) as updates:
                async for update in updates:
                    yield proxy_codec.update_message(update)
        finally:
            log.info("proxy %s left", proxy.key)
            self._loop.post_now(events.ProxyLeft(proxy_id=proxy.key))
        await _end(context, proxy.outbox)

    async def _read_proxy(
        self, messages: AsyncIterator[scheduler_pb2.ProxyMessage], proxy: Proxy
    ) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    for spec in message.submit.requests:
                        await self._submit(spec, proxy)
                case "cancel":
                    await self._loop.post(proxy_codec.cancelled(message.cancel))
                case "load":
                    proxy.parked_requests = message.load.parked_requests
                case "ask":
                    self._loop.send_progress(proxy, message.ask.request_ids)
                case kind:
                    raise MessageError(f"a connected proxy sent {kind or 'nothing'}")

    async def _submit(self, spec: common_pb2.RequestSpec, proxy: Proxy) -> None:
        try:
            request = codec.request(spec, proxy_id=proxy.key, now_s=self._loop.clock())
        except MessageError as error:
            refused = effects.Refuse(
                request_id=spec.request_id,
                proxy_id=proxy.key,
                code="invalid",
                message=str(error),
                retry_after_s=0.0,
            )
            proxy.outbox.put(refused)
            return
        await self._loop.post(events.Submitted(request=request), spec.SerializeToString())

    async def GetStatus(
        self, request: scheduler_pb2.StatusRequest, context: StatusContext
    ) -> scheduler_pb2.StatusReply:
        loop = self._loop
        return status_codec.status(loop.machine, loop.addresses, loop.clock())

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: PolicyContext
    ) -> scheduler_pb2.SetPolicyReply:
        try:
            changed = codec.policy_changed(request)
            weighed = codec.weights_changed(request, self._loop.machine.weights)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        now = before = self._loop.machine.policy
        if changed is not None:
            before, now = await self._loop.set_policy(changed), changed.policy
        if weighed is not None:
            await self._loop.set_weights(weighed)
        weights = codec.WEIGHTS.encode(self._loop.machine.weights)
        return scheduler_pb2.SetPolicyReply(before=before, now=now, weights=weights)

    async def SetImprovementRate(
        self, request: scheduler_pb2.SetImprovementRateRequest, context: RateContext
    ) -> scheduler_pb2.SetImprovementRateReply:
        try:
            changed = codec.improvement_rate_changed(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before, now = await self._loop.set_improvement_rate(changed)
        return scheduler_pb2.SetImprovementRateReply(before=before, now=now)

    async def GetLoad(
        self, request: scheduler_pb2.LoadRequest, context: LoadContext
    ) -> scheduler_pb2.LoadReply:
        return load_message(self._loop.load())

    async def SetCordon(
        self, request: scheduler_pb2.SetCordonRequest, context: CordonContext
    ) -> scheduler_pb2.SetCordonReply:
        if not await self._loop.set_cordon(request.instance_id, cordoned=request.cordoned):
            await _unknown(context, request.instance_id)
        return scheduler_pb2.SetCordonReply()

    async def Evict(
        self, request: scheduler_pb2.EvictRequest, context: EvictContext
    ) -> scheduler_pb2.EvictReply:
        if not await self._loop.evict(request.instance_id, abort=request.abort):
            await _unknown(context, request.instance_id)
        return scheduler_pb2.EvictReply()

    async def Explain(
        self, request: scheduler_pb2.ExplainRequest, context: ExplainContext
    ) -> scheduler_pb2.Explanation:
        found = self._loop.machine.explain(request.request_id, self._loop.clock())
        if found is None:
            message = f"no request {request.request_id!r} is known, or no longer"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return status_codec.EXPLANATION.encode(found)

    async def WatchBoard(
        self, request: scheduler_pb2.WatchBoardRequest, context: BoardContext
    ) -> AsyncIterator[scheduler_pb2.BoardLines]:
        feed = self._loop.board
        outbox = feed.watch(self._loop.clock())
        try:
            while lines := await outbox.take():
                yield scheduler_pb2.BoardLines(lines=b"".join(lines))
                await asyncio.sleep(BOARD_INTERVAL_S)
        finally:
            feed.leave(outbox)
        await _end(context, outbox)

    async def _first(self, messages: AsyncIterator[M]) -> M | None:
        """Returns the stream's first message; None if no message comes within a lease."""
        with contextlib.suppress(StopAsyncIteration, TimeoutError):
            return await asyncio.wait_for(anext(messages), self._loop.config.lease_s)
        return None


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
        reader.cancel()
        await asyncio.wait([reader])


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
