"""Encodes the scheduler's state for the CLI, administrators and the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.priority import POLICIES
from millrace.core.request import RequestState
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.scheduler.explanation.mechanisms import Mechanism, mechanisms
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance
from millrace.core.scheduler.machine import Machine
from millrace.wire.codec.derive import derive
from millrace.wire.codec.scheduler import BREAKERS, PREEMPTIONS, ROLES, WEIGHTS
from millrace.wire.pb import common_pb2, scheduler_pb2

MECHANISM = derive(Mechanism, scheduler_pb2.Mechanism)
EXPLANATION = derive(Explanation, scheduler_pb2.Explanation)


def status(
    machine: Machine, addresses: Mapping[str, str], now_s: float
) -> scheduler_pb2.StatusReply:
    """Encodes the scheduler's view of the fleet, and the settings in force.

    `addresses` are host:port by instance id.
    """
    states = Counter(request.state for request in machine.requests.values())
    return scheduler_pb2.StatusReply(
        instances=[
            _instance(instance, addresses[instance.id], machine, now_s)
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
        weights=WEIGHTS.encode(machine.weights),
        mechanisms=map(MECHANISM.encode, mechanisms(machine)),
    )


def _instance(
    instance: Instance, address: str, machine: Machine, now_s: float
) -> scheduler_pb2.InstanceStatus:
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
        breaker=BREAKERS.number[machine.breakers.state(instance.id)],
        slowness=BREAKERS.number[machine.slow_instances.state(instance.id)],
    )


#: An absent signal was not measured.
_POOL = derive(PoolLoad, scheduler_pb2.PoolLoad)


def load_message(load: FleetLoad) -> scheduler_pb2.LoadReply:
    return scheduler_pb2.LoadReply(
        pools=map(_POOL.encode, load.pools.values()), parked_requests=load.parked_requests
    )


def fleet_load(message: scheduler_pb2.LoadReply) -> FleetLoad:
    return FleetLoad(
        pools={pool.role: pool for pool in map(_POOL.decode, message.pools)},
        parked_requests=message.parked_requests,
    )
