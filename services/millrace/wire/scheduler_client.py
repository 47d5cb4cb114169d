"""Calls to a scheduler by those who hold no stream to it: administrators and their tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from millrace.core.errors import MillraceError
from millrace.wire.channel import open_channel
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc

TIMEOUT_S = 5.0


class SchedulerUnavailable(MillraceError):
    """No scheduler answers at the address."""


class SchedulerRefused(MillraceError):
    """The scheduler says what is wrong with the call."""


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


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[scheduler_pb2_grpc.SchedulerStub]:
    try:
        async with open_channel(address) as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise SchedulerRefused(error.details() or "") from error
        why = error.details() or error.code().name
        raise SchedulerUnavailable(f"no scheduler at {address}: {why}") from error
