"""Calls to a scheduler by those who hold no stream to it: administrators and their tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from millrace.core.autoscale.load import FleetLoad
from millrace.core.errors import MillraceError
from millrace.core.scheduler.mechanisms import Mechanism
from millrace.wire.channel import open_channel
from millrace.wire.codec.load import fleet_load
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

TIMEOUT_S = 5.0


class SchedulerUnavailable(MillraceError):
    """No scheduler answers at the address."""


class SchedulerRefused(MillraceError):
    """The scheduler says what is wrong with the call."""


class UnknownInstance(MillraceError):
    """No instance of that id is registered at the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An instance as the scheduler sees it."""

    id: str
    role: str  # prefill | decode | mixed
    address: str  # host:port
    draining: bool  # takes no new work: cordoned, or leaving
    running: int  # requests in compute or in the batch, as it last said, like `waiting`
    waiting: int
    held_requests: int  # that hold pages there, or will; draining with 0 of them, it may go
    total_pages: int
    free_pages: int


async def get_settings(address: str) -> dict[str, Any]:
    """`policy`, `preemption`, `planner` and `improvement_rate` in force, and the `policies`.

    Raises SchedulerUnavailable.
    """
    async with _stub(address) as stub:
        reply = await stub.GetStatus(scheduler_pb2.StatusRequest(), timeout=TIMEOUT_S)
    return {
        "policy": reply.policy,
        "preemption": reply.preemption,
        "planner": reply.planner,
        "improvement_rate": reply.improvement_rate,
        "policies": list(reply.policies),
    }


async def get_mechanisms(address: str) -> list[Mechanism]:
    """What is in force at the scheduler, and what is not. Raises SchedulerUnavailable."""
    async with _stub(address) as stub:
        reply = await stub.GetStatus(scheduler_pb2.StatusRequest(), timeout=TIMEOUT_S)
    return [Mechanism(one.name, one.on, one.detail) for one in reply.mechanisms]


async def set_policy(address: str, policy: str) -> dict[str, Any]:
    """The `policy` in force now, and the one `before`.

    Raises SchedulerRefused for an unknown policy, SchedulerUnavailable.
    """
    async with _stub(address) as stub:
        request = scheduler_pb2.SetPolicyRequest(policy=policy)
        reply = await stub.SetPolicy(request, timeout=TIMEOUT_S)
    return {"policy": reply.now, "before": reply.before}


async def set_improvement_rate(address: str, wanted: float | str) -> dict[str, Any]:
    """The `improvement_rate` in force now, and the one `before`.

    `wanted` is a rate for good, or a table ARRIVALS_PER_S:RATE,... to look it up in. Raises
    SchedulerRefused for a rate or a table that makes no sense, SchedulerUnavailable.
    """
    request = (
        scheduler_pb2.SetImprovementRateRequest(rates=wanted)
        if isinstance(wanted, str)
        else scheduler_pb2.SetImprovementRateRequest(rate=wanted)
    )
    async with _stub(address) as stub:
        reply = await stub.SetImprovementRate(request, timeout=TIMEOUT_S)
    return {"improvement_rate": reply.now, "before": reply.before}


async def get_load(address: str) -> FleetLoad:
    """The signals of all pools, now. Raises SchedulerUnavailable."""
    async with _stub(address) as stub:
        reply = await stub.GetLoad(scheduler_pb2.LoadRequest(), timeout=TIMEOUT_S)
    return fleet_load(reply)


async def get_instances(address: str) -> list[InstanceView]:
    """All instances that are registered. Raises SchedulerUnavailable."""
    async with _stub(address) as stub:
        reply = await stub.GetStatus(scheduler_pb2.StatusRequest(), timeout=TIMEOUT_S)
    return [
        InstanceView(
            id=one.incarnation.id,
            role=one.role,
            address=one.address,
            draining=one.draining,
            running=one.running,
            waiting=one.waiting,
            held_requests=one.held_requests,
            total_pages=one.total_pages,
            free_pages=one.free_pages,
        )
        for one in reply.instances
    ]


async def set_cordon(address: str, instance_id: str, cordoned: bool) -> None:
    """No new work for the instance, or some again; a new life of it is not cordoned.

    Raises UnknownInstance, SchedulerUnavailable.
    """
    async with _stub(address) as stub:
        request = scheduler_pb2.SetCordonRequest(instance_id=instance_id, cordoned=cordoned)
        await stub.SetCordon(request, timeout=TIMEOUT_S)


async def evict(address: str, instance_id: str, *, abort: bool) -> None:
    """Cordons the instance and ends what it holds: to go on elsewhere, or with `abort` for good.

    Returns when the instance is told. Raises UnknownInstance, SchedulerUnavailable.
    """
    async with _stub(address) as stub:
        request = scheduler_pb2.EvictRequest(instance_id=instance_id, abort=abort)
        await stub.Evict(request, timeout=TIMEOUT_S)


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[scheduler_pb2_grpc.SchedulerStub]:
    try:
        async with open_channel(address) as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise SchedulerRefused(error.details() or "") from error
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise UnknownInstance(error.details() or "") from error
        why = error.details() or error.code().name
        raise SchedulerUnavailable(f"no scheduler at {address}: {why}") from error
