"""The gRPC services of the stub fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from millrace.core.incarnation import Incarnation
from millrace.core.priority import POLICIES
from millrace.core.token_events import TokenBatch
from millrace.core.weights import Weights
from millrace.wire.codec import proxy as proxy_codec
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.incarnation import incarnation_of
from millrace.wire.codec.token_events import batch_message
from millrace.wire.fleet_messages import ProxyMessage, ProxyUpdate
from millrace.wire.pb import (
    decode_pb2,
    decode_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]


class Fleet(Protocol):
    """Plays the scheduler and the decode instance."""

    decode: Incarnation
    policy: str
    weights: Weights
    improvement_rate: float
    parked_requests: int

    def serve_proxy(
        self, proxy: str, messages: AsyncIterator[ProxyMessage]
    ) -> AsyncIterator[ProxyUpdate]: ...

    def serve_tokens(self, proxy: str) -> AsyncIterator[TokenBatch]: ...


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def ConnectProxy(
        self, request_iterator: AsyncIterator[scheduler_pb2.ProxyMessage], context: Context
    ) -> AsyncIterator[scheduler_pb2.ProxyUpdate]:
        proxy = (await anext(request_iterator)).hello.id
        messages = _decoded(request_iterator)
        async for update in self._fleet.serve_proxy(proxy, messages):
            yield proxy_codec.update_message(update)

    async def ConnectWorker(
        self, request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage], context: Context
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this fleet has no workers")
        yield scheduler_pb2.WorkerCommand()

    async def GetStatus(
        self, request: scheduler_pb2.StatusRequest, context: Context
    ) -> scheduler_pb2.StatusReply:
        return scheduler_pb2.StatusReply(
            policy=self._fleet.policy,
            preemption=scheduler_pb2.PREEMPTION_NONE,
            planner="least_queue",
            policies=POLICIES,
            improvement_rate=self._fleet.improvement_rate,
            weights=codec.WEIGHTS.encode(self._fleet.weights),
        )

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: Context
    ) -> scheduler_pb2.SetPolicyReply:
        try:
            changed = codec.policy_changed(request)
            weighed = codec.weights_changed(request, self._fleet.weights)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before = self._fleet.policy
        if changed is not None:
            self._fleet.policy = changed.policy
        if weighed is not None:
            self._fleet.weights = self._fleet.weights.with_changes(weighed.weights)
        weights = codec.WEIGHTS.encode(self._fleet.weights)
        return scheduler_pb2.SetPolicyReply(before=before, now=self._fleet.policy, weights=weights)

    async def SetImprovementRate(
        self, request: scheduler_pb2.SetImprovementRateRequest, context: Context
    ) -> scheduler_pb2.SetImprovementRateReply:
        try:
            wanted = codec.improvement_rate_changed(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before = self._fleet.improvement_rate
        now = wanted.rows[0][1] if wanted.rate is None else wanted.rate
        self._fleet.improvement_rate = now
        return scheduler_pb2.SetImprovementRateReply(before=before, now=now)

    async def Explain(
        self, request: scheduler_pb2.ExplainRequest, context: Context
    ) -> scheduler_pb2.Explanation:
        message = f"no request {request.request_id!r} waits in this fleet"
        await context.abort(grpc.StatusCode.NOT_FOUND, message)

    async def WatchBoard(
        self, request: scheduler_pb2.WatchBoardRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.BoardLines]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this fleet has no workers")
        yield scheduler_pb2.BoardLines()

    async def GetLoad(
        self, request: scheduler_pb2.LoadRequest, context: Context
    ) -> scheduler_pb2.LoadReply:
        return scheduler_pb2.LoadReply(parked_requests=self._fleet.parked_requests)

    async def SetCordon(
        self, request: scheduler_pb2.SetCordonRequest, context: Context
    ) -> scheduler_pb2.SetCordonReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")

    async def Evict(
        self, request: scheduler_pb2.EvictRequest, context: Context
    ) -> scheduler_pb2.EvictReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")


async def _decoded(
    messages: AsyncIterator[scheduler_pb2.ProxyMessage],
) -> AsyncIterator[ProxyMessage]:
    async for message in messages:
        for item in proxy_codec.items_of(message):
            yield item


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def StreamTokens(
        self, request: decode_pb2.TokenSubscription, context: Context
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        if incarnation_of(request.decode) != self._fleet.decode:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        async for batch in self._fleet.serve_tokens(request.proxy.id):
            yield batch_message(batch)
