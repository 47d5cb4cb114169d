"""`reconcile_service`: makes the children of a ModelService, and its status from theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from millrace_operator.manifests import objects
from millrace_operator.manifests.naming import part_name
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import Object, ObservedService, Service
from millrace_operator.reconcile import conditions
from millrace_operator.reconcile.actions import Action, Apply, Delete, Report, SetStatus
from millrace_operator.reconcile.conditions import Condition
from millrace_operator.schema.pools import KINDS, PoolKind
from millrace_operator.spec import Defaults, SpecError, parse_service

#: The parts that are Deployments, and the components of their pods.
_PARTS = (("scheduler", "scheduler"), ("gateway", "proxy"))


def reconcile_service(
    service: Service, observed: ObservedService, defaults: Defaults
) -> list[Action]:
    """Returns the actions for a ModelService."""
    if "deletionTimestamp" in service.metadata:
        return []  # the garbage collector deletes the children
    if service.spec.paused:
        return _status_actions(service, observed, revision=service.status.get("revision", ""))
    try:
        context = Context.of(service, defaults, _listed(observed))
        wanted = objects.of_service(context)
    except SpecError as error:
        problem = Report(reason="InvalidSpec", message=str(error), warning=True)
        revision = service.status.get("revision", "")
        return _status_actions(service, observed, revision=revision, problem=problem)
    missing = None
    if problems := context.models.problems:
        missing = Report(reason="ModelMissing", message="; ".join(problems), warning=True)
    return [
        *(Apply(manifest=manifest) for manifest in objects.changed(observed.live, wanted)),
        *_retired(service, observed),
        *_status_actions(service, observed, revision=context.revision, problem=missing),
    ]


def _listed(observed: ObservedService) -> dict[str, Service]:
    """Returns the ModelServices behind the gateway that can be read."""
    found = {}
    for name, given in observed.listed.items():
        with contextlib.suppress(SpecError):  # its own pass says so
            found[name] = parse_service(given)
    return found


def _retired(service: Service, observed: ObservedService) -> list[Delete]:
    """Deletes pools that the spec does not name any more, after they have drained."""
    return [
        Delete(kind=kind.kind, name=pool["metadata"]["name"], uid=pool["metadata"]["uid"])
        for kind in KINDS.values()
        if kind.role not in service.spec.pools and (pool := _pool(service, observed, kind))
        if pool.get("status", {}).get("replicas") == 0
    ]


def _pool(service: Service, observed: ObservedService, kind: PoolKind) -> Object | None:
    return observed.live.get((kind.kind, kind.name_in(service.name)))


def _status_actions(
    service: Service, observed: ObservedService, *, revision: str, problem: Report | None = None
) -> list[Action]:
    last = service.status
    now = _status(service, observed, revision, problem)
    found: list[Action] = []
    if problem and conditions.by_type(last).get("Degraded", {}).get("message") != problem.message:
        found.append(problem)
    if now != last:
        found.append(SetStatus(status=now))
    return found


def _status(
    service: Service, observed: ObservedService, revision: str, problem: Report | None
) -> dict[str, Any]:
    name, metadata = service.name, service.metadata
    generation = metadata.get("generation", 0)
    pools = {kind.role: _pool(service, observed, kind) for kind in KINDS.values()}
    states = [
        _available(service, observed, pools),
        _progressing(service, pools, problem),
        _degraded(service, observed, pools, problem),
    ]
    port = service.spec.gateway.port
    return {
        "observedGeneration": generation,
        "phase": _phase(service, pools, *states),
        "endpoint": f"http://{part_name(name, 'proxy')}.{metadata['namespace']}.svc:{port}",
        **{f"{role}Ready": _ready(pool) for role, pool in pools.items() if pool is not None},
        "revision": revision,
        "conditions": conditions.updated(
            service.status, states, generation=generation, now_s=observed.now_s
        ),
    }


def _ready(pool: Object) -> str:
    return f"{pool.get('status', {}).get('readyReplicas', 0)}/{pool['spec']['replicas']}"


def _phase(
    service: Service,
    pools: Mapping[str, Object | None],
    available: Condition,
    progressing: Condition,
    degraded: Condition,
) -> str:
    if service.spec.paused:
        return "Paused"
    if degraded.status:
        return "Degraded"
    if not available.status:
        return "Pending"
    if available.reason == "Asleep":
        return "Idle"
    return "Scaling" if progressing.status else "Ready"


def _available(
    service: Service, observed: ObservedService, pools: Mapping[str, Object | None]
) -> Condition:
    """Returns whether a new request is answered, if necessary after the pools have woken."""
    for part, component in _PARTS:
        if not _deployed(service, observed, component).get("availableReplicas"):
            why = _part_trouble(service, observed, component)
            message = f"the {part} is not ready" + (f": {why}" if why else "")
            return Condition("Available", False, "NotReady", message)
    serving = {role: pools[role] for role in ("prefill", "decode") if role in service.spec.pools}
    for role, pool in serving.items():
        state = _condition(pool, "Available")
        if state.get("status") != "True":
            why = state.get("message", "there is no pool yet")
            return Condition("Available", False, "NotReady", f"{role}: {why}")
    if any(pool is not None and not pool["spec"]["replicas"] for pool in serving.values()):
        message = "the next request waits at the gateway and wakes the pools"
        return Condition("Available", True, "Asleep", message)
    return Condition("Available", True, "Serving", "requests are answered")


def _deployed(service: Service, observed: ObservedService, component: str) -> Mapping[str, Any]:
    """Returns the status of a component's Deployment; empty: there is none."""
    name = part_name(service.name, component)
    status: Mapping[str, Any] = observed.live.get(("Deployment", name), {}).get("status", {})
    return status


def _part_trouble(service: Service, observed: ObservedService, component: str) -> str:
    """Returns why a component's pods do not start, or are not made; empty: no reason is known."""
    if trouble := observed.troubles.get(component, ""):
        return trouble
    status = _deployed(service, observed, component)
    failure = conditions.by_type(status).get("ReplicaFailure", {})
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""


def _progressing(
    service: Service, pools: Mapping[str, Object | None], problem: Report | None
) -> Condition:
    if service.spec.paused:
        return Condition("Progressing", False, "Paused", "spec.paused is set")
    if problem is not None:
        return Condition("Progressing", False, problem.reason, problem.message)
    for role, pool in pools.items():
        missing = pool is None and role in service.spec.pools
        state = _condition(pool, "Progressing")
        if missing or (pool is not None and state.get("status", "True") == "True"):
            message = f"{role}: {state.get('message', 'starting')}"
            return Condition("Progressing", True, state.get("reason", "Starting"), message)
    return Condition("Progressing", False, "Settled", "every pool has its size and its template")


def _degraded(
    service: Service,
    observed: ObservedService,
    pools: Mapping[str, Object | None],
    problem: Report | None,
) -> Condition:
    if problem is not None:
        return Condition("Degraded", True, problem.reason, problem.message)
    for part, component in _PARTS:
        if trouble := _part_trouble(service, observed, component):
            return Condition("Degraded", True, "PodTrouble", f"{part}: {trouble}")
    for role, pool in pools.items():
        state = _condition(pool, "Degraded")
        if state.get("status") == "True":
            return Condition("Degraded", True, state["reason"], f"{role}: {state['message']}")
    return Condition("Degraded", False, "Healthy", "")


def _condition(pool: Object | None, kind: str) -> Mapping[str, Any]:
    return conditions.by_type((pool or {}).get("status", {})).get(kind, {})
