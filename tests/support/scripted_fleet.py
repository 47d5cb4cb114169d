"""The bench's stub fleet with all that tests script: refusals, failures, losses, administration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

from millrace.bench.gateway.stub_fleet import Outbox, StubFleet
from millrace.bench.gateway.stub_servicers import Context, ProxyServicer
from millrace.core.incarnation import Incarnation
from millrace.core.priority import POLICIES
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import KeepTraces
from millrace.core.scheduler.effects import Fail, Refuse, Suspect
from millrace.core.scheduler.events import CancelRequested
from millrace.core.weights import DEFAULT_CLASS, DEFAULT_TENANT, Weights
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.request_spec import decode_spec
from millrace.wire.fleet_messages import (
    AskProgress,
    Fleet,
    OpenRequest,
    Progress,
    ProxyLoad,
    ProxyMessage,
    ProxyUpdate,
    Queued,
)
from millrace.wire.pb import scheduler_pb2

M = TypeVar("M")


class ScriptedFleet(StubFleet):
    """Tells proxies what a test wants, and notes what they tell."""

    def __init__(
        self,
        on_submit: Callable[[RequestSpec], None],
        on_cancel: Callable[[CancelRequested], None],
    ) -> None:
        super().__init__(on_submit, on_cancel)
        #: Whether the fleet is ready; sent at hello. `announce` changes it.
        self.ready = True
        self.policy = "fcfs"
        self.weights = Weights(classes={DEFAULT_CLASS: 1.0}, tenants={DEFAULT_TENANT: 1.0})
        self.improvement_rate = 0.3
        self.parked_requests = 0  # in a proxy's last report
        #: What proxies named when they connected again, and whether the scheduler has lost it.
        self.reopened: list[OpenRequest] = []
        self.forgets = False
        self.kept_traces: list[str] = []  # that proxies have named
        #: Answers to proxies that ask for a prompt's progress, by the request's id.
        self.progress: dict[str, Progress] = {}
        self._proxies: set[str] = set()

    def scheduler_servicer(self) -> ProxyServicer:
        return SchedulerServicer(self)

    async def stop_decode(self) -> None:
        for proxy, outbox in self.tokens.items():
            self.tokens[proxy] = successor(outbox)
        await super().stop_decode()

    def announce(self, *, ready: bool) -> None:
        """Tells every proxy whether the fleet is ready."""
        self.ready = ready
        for proxy in self._proxies:
            self.updates[proxy].put(self.fleet())

    def fleet(self) -> Fleet:
        return Fleet(decode=(self.member,), ready=self.ready)

    def queue(self, spec: RequestSpec) -> None:
        """Reports that a request waits for a decode instance."""
        self._update(spec, Queued(request_id=spec.request_id))

    def refuse(
        self, spec: RequestSpec, code: str, message: str, retry_after_s: float = 0.0
    ) -> None:
        self._update(
            spec,
            Refuse(
                request_id=spec.request_id,
                proxy_id=spec.proxy.id,
                code=code,
                message=message,
                retry_after_s=retry_after_s,
            ),
        )

    def fail(
        self,
        spec: RequestSpec,
        message: str,
        *,
        resumable: bool = False,
        prompt_unread: bool = False,
        quarantined: bool = False,
    ) -> None:
        self._update(
            spec,
            Fail(
                request_id=spec.request_id,
                proxy_id=spec.proxy.id,
                message=message,
                resumable=resumable,
                prompt_unread=prompt_unread,
                quarantined=quarantined,
            ),
        )

    def suspect(self, spec: RequestSpec, *deaths: Incarnation) -> None:
        """Reports the lost instances at which a request was open."""
        suspect = Suspect(request_id=spec.request_id, proxy_id=spec.proxy.id, deaths=deaths)
        self._update(spec, suspect)

    def _update(self, spec: RequestSpec, update: ProxyUpdate) -> None:
        self.updates[spec.proxy.id].put(update)

    def lose(self, proxy_id: str) -> int:
        """Loses the events that wait, as a stream that breaks does; returns their number."""
        outbox = self.tokens[proxy_id]
        lost = len(drop(outbox))
        outbox.count += lost
        return lost

    async def serve_proxy(
        self, proxy: str, messages: AsyncIterator[ProxyMessage]
    ) -> AsyncIterator[ProxyUpdate]:
        self._proxies.add(proxy)
        try:
            async for update in super().serve_proxy(proxy, messages):
                yield update
        finally:
            self._proxies.discard(proxy)

    def hear(self, proxy: str, message: ProxyMessage) -> None:
        match message:
            case ProxyLoad():
                self.parked_requests = message.parked_requests
            case AskProgress():
                known = [i for i in message.request_ids if i in self.progress]
                self.updates[proxy].put(*(self.progress[request_id] for request_id in known))
            case KeepTraces():
                self.kept_traces += message.trace_ids
            case OpenRequest():
                self._reopened(message)
            case _:
                super().hear(proxy, message)

    def _reopened(self, message: OpenRequest) -> None:
        self.reopened.append(message)
        spec = decode_spec(message.request)
        if self.forgets and message.token_age_s is None:
            self.on_submit(spec)
        elif self.forgets:
            self.fail(spec, "no instance holds it", resumable=True)


def drop(outbox: Outbox[M]) -> list[M]:
    """Returns all messages that wait, as if they were sent to a peer that never read them."""
    dropped, outbox.waiting = outbox.waiting, []
    outbox.ready.clear()
    return dropped


def successor(outbox: Outbox[M]) -> Outbox[M]:
    """Moves what waits to another outbox, out of reach of those who still wait at this one."""
    other: Outbox[M] = Outbox()
    other.count = outbox.count
    other.put(*drop(outbox))
    return other


class SchedulerServicer(ProxyServicer):
    """The calls of administrators: settings change, and there is no instance to name."""

    def __init__(self, fleet: ScriptedFleet) -> None:
        super().__init__(fleet)
        self._settings = fleet

    async def GetStatus(
        self, request: scheduler_pb2.StatusRequest, context: Context
    ) -> scheduler_pb2.StatusReply:
        return scheduler_pb2.StatusReply(
            policy=self._settings.policy,
            preemption=scheduler_pb2.PREEMPTION_NONE,
            planner="least_queue",
            policies=POLICIES,
            improvement_rate=self._settings.improvement_rate,
            weights=codec.WEIGHTS.encode(self._settings.weights),
        )

    async def SetPolicy(
        self, request: scheduler_pb2.SetPolicyRequest, context: Context
    ) -> scheduler_pb2.SetPolicyReply:
        try:
            changed = codec.policy_changed(request)
            weighed = codec.weights_changed(request, self._settings.weights)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before = self._settings.policy
        if changed is not None:
            self._settings.policy = changed.policy
        if weighed is not None:
            self._settings.weights = self._settings.weights.with_changes(weighed.weights)
        weights = codec.WEIGHTS.encode(self._settings.weights)
        return scheduler_pb2.SetPolicyReply(
            before=before, now=self._settings.policy, weights=weights
        )

    async def SetImprovementRate(
        self, request: scheduler_pb2.SetImprovementRateRequest, context: Context
    ) -> scheduler_pb2.SetImprovementRateReply:
        try:
            wanted = codec.improvement_rate_changed(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        before = self._settings.improvement_rate
        now = wanted.rows[0][1] if wanted.rate is None else wanted.rate
        self._settings.improvement_rate = now
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
        return scheduler_pb2.LoadReply(parked_requests=self._settings.parked_requests)

    async def SetCordon(
        self, request: scheduler_pb2.SetCordonRequest, context: Context
    ) -> scheduler_pb2.SetCordonReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")

    async def Evict(
        self, request: scheduler_pb2.EvictRequest, context: Context
    ) -> scheduler_pb2.EvictReply:
        await context.abort(grpc.StatusCode.NOT_FOUND, "this fleet has no workers")
