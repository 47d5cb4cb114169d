"""Calls to a scheduler without a stream: for administrators, tools and the operator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from millrace.core.autoscale.load import FleetLoad
from millrace.core.errors import MillraceError
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.scheduler.explanation.mechanisms import Mechanism
from millrace.core.weights import Weights
from millrace.wire.channel import open_channel
from millrace.wire.clients.scheduler_stream import leader_in
from millrace.wire.codec.scheduler import BREAKERS, PREEMPTIONS, ROLES, WEIGHTS
from millrace.wire.codec.status import EXPLANATION, MECHANISM, fleet_load
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

R = TypeVar("R")

TIMEOUT_S = 5.0


class SchedulerUnavailable(MillraceError):
    """No scheduler answers at the address."""


class SchedulerRefused(MillraceError):
    """The scheduler refused the call and gave the reason."""


class UnknownInstance(MillraceError):
    """No instance with this id is registered at the scheduler."""


class UnknownRequest(MillraceError):
    """The scheduler does not know a request with this id, or no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """The scheduler's view of an instance."""

    id: str
    role: str  # prefill | decode | mixed
    address: str  # host:port
    draining: bool  # takes no new work: cordoned, or leaving
    running: int  # requests in compute or in the batch, in its last report (as `waiting`)
    waiting: int
    held_requests: int  # hold pages there, or will; a draining instance may go at 0
    total_pages: int
    free_pages: int
    breaker: str = "closed"  # or open | half_open: its errors keep new requests from it
    slowness: str = "closed"  # the same of a prefill instance that lags


async def get_settings(address: str) -> dict[str, Any]:
    """Returns `policy`, `preemption`, `planner`, `improvement_rate` and `weights` (of `classes` and
    of `tenants`), and all `policies`.

    Raises SchedulerUnavailable.
    """
    reply = await _status(address)
    return {
        "policy": reply.policy,
        "preemption": PREEMPTIONS.word[reply.preemption],
        "planner": reply.planner,
        "improvement_rate": reply.improvement_rate,
        "weights": _weights(reply.weights),
        "policies": list(reply.policies),
    }


async def get_mechanisms(address: str) -> list[Mechanism]:
    """Returns the mechanisms and whether they are in force. Raises SchedulerUnavailable."""
    reply = await _status(address)
    return list(map(MECHANISM.decode, reply.mechanisms))


async def set_policy(address: str, policy: str, weights: Weights | None = None) -> dict[str, Any]:
    """Changes the policy, unless it is empty, and weights, if any are given.

    Returns the `policy` in force, the policy `before`, and after a change of weights all `weights`.

    Raises SchedulerRefused for an unknown policy, class or tenant and a bad weight,
    SchedulerUnavailable.
    """
    wanted = None if weights is None else WEIGHTS.encode(weights)
    request = scheduler_pb2.SetPolicyRequest(policy=policy, weights=wanted)
    reply = await _call(address, lambda stub: stub.SetPolicy(request, timeout=TIMEOUT_S))
    found: dict[str, Any] = {"policy": reply.now, "before": reply.before}
    return found if weights is None else {**found, "weights": _weights(reply.weights)}


def _weights(message: scheduler_pb2.Weights) -> dict[str, dict[str, float]]:
    return {
        "classes": dict(sorted(message.classes.items())),
        "tenants": dict(sorted(message.tenants.items())),
    }


async def set_improvement_rate(address: str, wanted: float | str) -> dict[str, Any]:
    """Changes the rate; returns the `improvement_rate` in force and the rate `before`.

    `wanted` is a fixed rate, or a table ARRIVALS_PER_S:RATE,... of rates by load. Raises
    SchedulerRefused for an invalid rate or table, SchedulerUnavailable.
    """
    request = (
        scheduler_pb2.SetImprovementRateRequest(rates=wanted)
        if isinstance(wanted, str)
        else scheduler_pb2.SetImprovementRateRequest(rate=wanted)
    )
    reply = await _call(address, lambda stub: stub.SetImprovementRate(request, timeout=TIMEOUT_S))
    return {"improvement_rate": reply.now, "before": reply.before}


async def get_load(address: str) -> FleetLoad:
    """Returns the present signals of all pools. Raises SchedulerUnavailable."""
    request = scheduler_pb2.LoadRequest()
    reply = await _call(address, lambda stub: stub.GetLoad(request, timeout=TIMEOUT_S))
    return fleet_load(reply)


async def get_instances(address: str) -> list[InstanceView]:
    """Returns all registered instances. Raises SchedulerUnavailable."""
    reply = await _status(address)
    return [
        InstanceView(
            id=one.incarnation.id,
            role=ROLES.word[one.role],
            address=one.address,
            draining=one.draining,
            running=one.running,
            waiting=one.waiting,
            held_requests=one.held_requests,
            total_pages=one.total_pages,
            free_pages=one.free_pages,
            breaker=BREAKERS.word[one.breaker],
            slowness=BREAKERS.word[one.slowness],
        )
        for one in reply.instances
    ]


async def explain(address: str, request_id: str) -> Explanation:
    """Says why a request waits, or waited if it ended lately.

    Raises UnknownRequest, SchedulerUnavailable.
    """
    request = scheduler_pb2.ExplainRequest(request_id=request_id)
    try:
        reply = await _call(address, lambda stub: stub.Explain(request, timeout=TIMEOUT_S))
    except UnknownInstance as error:  # the same status
        raise UnknownRequest(str(error)) from error
    return EXPLANATION.decode(reply)


async def watch_board(address: str) -> AsyncGenerator[bytes, None]:
    """Yields the board's lines (`core.board.events`) as they come, one or more whole lines at once.

    The first are the head and what is there now. Raises SchedulerUnavailable, also where the
    scheduler ends the stream of a listener that reads too slowly.
    """
    status = scheduler_pb2.StatusRequest()
    leader, _ = await _answer(address, lambda stub: stub.GetStatus(status, timeout=TIMEOUT_S))
    try:
        async with open_channel(leader) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            async for part in stub.WatchBoard(scheduler_pb2.WatchBoardRequest()):
                yield part.lines
    except grpc.aio.AioRpcError as error:
        why = error.details() or error.code().name
        raise SchedulerUnavailable(f"no scheduler at {leader}: {why}") from error


async def set_cordon(address: str, instance_id: str, cordoned: bool) -> None:
    """Cordons or uncordons the instance; its next incarnation is not cordoned.

    Raises UnknownInstance, SchedulerUnavailable.
    """
    request = scheduler_pb2.SetCordonRequest(instance_id=instance_id, cordoned=cordoned)
    await _call(address, lambda stub: stub.SetCordon(request, timeout=TIMEOUT_S))


async def evict(address: str, instance_id: str, *, abort: bool) -> None:
    """Cordons the instance and has its requests migrated or retried; `abort` ends their answers.

    Returns once the command is sent. Raises UnknownInstance, SchedulerUnavailable.
    """
    request = scheduler_pb2.EvictRequest(instance_id=instance_id, abort=abort)
    await _call(address, lambda stub: stub.Evict(request, timeout=TIMEOUT_S))


async def _status(address: str) -> scheduler_pb2.StatusReply:
    request = scheduler_pb2.StatusRequest()
    return await _call(address, lambda stub: stub.GetStatus(request, timeout=TIMEOUT_S))


async def _call(
    addresses: str, make: Callable[[scheduler_pb2_grpc.SchedulerStub], Awaitable[R]]
) -> R:
    """Calls the scheduler that leads; returns its answer."""
    return (await _answer(addresses, make))[1]


async def _answer(
    addresses: str, make: Callable[[scheduler_pb2_grpc.SchedulerStub], Awaitable[R]]
) -> tuple[str, R]:
    """Calls the scheduler that leads, found from any of `addresses` (separated by commas).

    Returns its address, and its answer.
    """
    to_try, failures = [one.strip() for one in addresses.split(",")], []
    for address in to_try:
        try:
            async with open_channel(address) as channel:
                return address, await make(scheduler_pb2_grpc.SchedulerStub(channel))
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise SchedulerRefused(details) from error
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise UnknownInstance(details) from error
            failures.append(f"{address}: {details or error.code().name}")
            if (leader := leader_in(error)) and leader not in to_try:
                to_try.append(leader)
    raise SchedulerUnavailable(f"no scheduler at {'; at '.join(failures)}")
