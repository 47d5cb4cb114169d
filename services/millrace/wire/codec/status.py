"""Encodes the scheduler's state for the CLI, administrators and the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import Context
from millrace.core.priority import POLICIES
from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.mechanisms import mechanisms
from millrace.wire.codec.scheduler import PREEMPTIONS, ROLES
from millrace.wire.pb import common_pb2, scheduler_pb2


def status(
    machine: Machine, addresses: Mapping[str, str], now_s: float
) -> scheduler_pb2.StatusReply:
    """Encodes the scheduler's view of the fleet, and the settings in force.

    `addresses` are host:port by instance id.
    """
    states = Counter(request.state for request in machine.requests.values())
    return scheduler_pb2.StatusReply(
        instances=[
            _instance(instance, addresses[instance.id], now_s)
            for instance in machine.cluster.instances.values()
        ],
        queued=states[RequestState.QUEUED],
        prefilling=states[RequestState.PREFILLING] + states[RequestState.TRANSFERRING],
        decoding=states[RequestState.DECODING],
        policy=machine.policy,
        preemption=PREEMPTIONS.number[machine.config.preemption],
        planner=machine.config.planner,
        policies=POLICIES,
        improvement_rate=machine.improvement_rate,
        mechanisms=(
            scheduler_pb2.Mechanism(name=one.name, on=one.on, detail=one.detail)
            for one in mechanisms(machine)
        ),
    )


def _instance(instance: Instance, address: str, now_s: float) -> scheduler_pb2.InstanceStatus:
    if isinstance(instance, PrefillInstance):
        free_pages, queue_s = instance.free_pages, instance.outstanding_s(now_s)
    else:
        free_pages, queue_s = instance.open_pages, 0.0
    return scheduler_pb2.InstanceStatus(
        incarnation=common_pb2.Incarnation(id=instance.id, generation=instance.card.generation),
        role=ROLES.number[instance.card.role],
        address=address,
        draining=instance.draining,
        free_pages=free_pages,
        total_pages=instance.card.kv_pages,
        running=instance.running,
        waiting=instance.waiting,
        queue_s=queue_s,
        held_requests=len(instance.holdings),
    )


_SIGNALS = ("backlog_s", "arriving", "ttft_slo_ratio", "kv_utilisation", "tbt_slo_ratio")


def load_message(load: FleetLoad) -> scheduler_pb2.LoadReply:
    return scheduler_pb2.LoadReply(
        pools=[_pool_message(pool) for pool in load.pools.values()],
        parked_requests=load.parked_requests,
    )


def _pool_message(pool: PoolLoad) -> scheduler_pb2.PoolLoad:
    return scheduler_pb2.PoolLoad(
        role=ROLES.number[pool.role],
        ready=pool.ready,
        draining=pool.draining,
        active_requests=pool.active_requests,
        contexts=[
            scheduler_pb2.KvContext(
                tokens=context.tokens,
                final_tokens=context.final_tokens,
                growth_tokens_s=context.growth_tokens_s,
                owner_tokens=context.owner_tokens,
            )
            for context in pool.contexts
        ],
        **{name: getattr(pool, name) for name in _SIGNALS},
    )


def fleet_load(message: scheduler_pb2.LoadReply) -> FleetLoad:
    """Decodes a fleet's load. An absent signal was not measured."""
    return FleetLoad(
        pools={pool.role: pool for pool in map(_pool, message.pools)},
        parked_requests=message.parked_requests,
    )


def _pool(message: scheduler_pb2.PoolLoad) -> PoolLoad:
    signals = {
        name: getattr(message, name) if message.HasField(name) else None for name in _SIGNALS
    }
    return PoolLoad(
        role=ROLES.word[message.role],
        ready=message.ready,
        draining=message.draining,
        active_requests=message.active_requests,
        contexts=tuple(
            Context(
                tokens=context.tokens,
                final_tokens=context.final_tokens,
                growth_tokens_s=context.growth_tokens_s,
                owner_tokens=context.owner_tokens,
            )
            for context in message.contexts
        ),
        **signals,
    )
