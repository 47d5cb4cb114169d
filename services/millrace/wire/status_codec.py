"""The fleet as the scheduler sees it, for the CLI, administrators and the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millrace.core.instances import Instance, PrefillInstance
from millrace.core.machine import Machine
from millrace.core.priority import POLICIES
from millrace.core.request import RequestState
from millrace.wire.pb import scheduler_pb2


def status(
    machine: Machine, registers: Mapping[str, scheduler_pb2.Register], now_s: float
) -> scheduler_pb2.StatusReply:
    """The fleet as the scheduler sees it, and how it decides. `registers` by instance id."""
    states = Counter(request.state for request in machine.requests.values())
    return scheduler_pb2.StatusReply(
        instances=[
            _instance(instance, registers[instance.id], now_s)
            for instance in machine.cluster.instances.values()
        ],
        queued=states[RequestState.QUEUED],
        prefilling=states[RequestState.PREFILLING] + states[RequestState.TRANSFERRING],
        decoding=states[RequestState.DECODING],
        policy=machine.policy,
        preemption=machine.config.preemption,
        planner=machine.config.planner,
        policies=POLICIES,
        improvement_rate=machine.improvement_rate,
    )


def _instance(
    instance: Instance, register: scheduler_pb2.Register, now_s: float
) -> scheduler_pb2.InstanceStatus:
    if isinstance(instance, PrefillInstance):
        free_pages, queue_s = instance.free_pages, instance.outstanding_s(now_s)
    else:
        free_pages, queue_s = instance.open_pages, 0.0
    return scheduler_pb2.InstanceStatus(
        incarnation=register.incarnation,
        role=register.role,
        address=register.address,
        draining=instance.draining,
        free_pages=free_pages,
        total_pages=instance.card.kv_pages,
        running=instance.running,
        waiting=instance.waiting,
        queue_s=queue_s,
        held_requests=len(instance.holdings),
    )
