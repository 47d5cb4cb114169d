"""A pool and the observations around it, one pass of the operator at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema

from millrace.core.autoscale.drain import Cordon, Registration, Uncordon
from millrace.core.autoscale.rules import PoolMetrics, Recommendation
from millrace_operator.manifests import objects
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import ObservedPool, Pod, Pool
from millrace_operator.reconcile.actions import (
    Apply,
    Report,
    SetStatus,
)
from millrace_operator.reconcile.conditions import by_type, seconds
from millrace_operator.reconcile.pod_makers import pod_makers
from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.spec import parse_pool
from support.custom_resources import DEFAULTS, SCHEMAS, model_service, pool

NOW_S = 10_000.0
NAME = "chat-decode"
CALM = PoolMetrics(sampled_s=NOW_S, ready=3, active_requests=4, kv_utilisation=0.512)


def advice(replicas: int, **more: Any) -> Recommendation:
    return Recommendation(replicas=replicas, reason="KV in use", **more)


def pool_objects(pool: Pool, context: Context, size: int) -> list[dict[str, Any]]:
    """Returns all objects of a pool of `size` instances."""
    observed = ObservedPool(service=None, now_s=NOW_S, unix_s=NOW_S)
    makers = pod_makers(pool, context, observed)
    found = {(one["kind"], one["metadata"]["name"]): one for one in makers.wanted(size)}
    if pool.spec.stage_pods == "Own":  # later stages follow the pods of first ones
        pods = tuple(
            Pod(name=f"{pool.name}-{n}-0", uid=f"u{n}", ordinal=n, template=makers.template)
            for n in range(size)
        )
        makers = pod_makers(pool, context, replace(observed, live=found, pods=pods))
    return objects.of_pool(pool, makers.wanted(size))


class Scene:
    """A pool of `size` ready instances that hold nothing, as an earlier pass left it."""

    def __init__(self, size: int = 3, **spec: Any) -> None:
        self.pool = pool(replicas=size, **spec)
        self.service = model_service()
        self.observed = ObservedPool(
            service=self.service,
            metrics=CALM,
            recommendation=advice(size),
            now_s=NOW_S,
            unix_s=NOW_S,
        )
        for action in self.look():
            if isinstance(action, Apply):
                manifest = dict(action.manifest)
                self.observed.live[manifest["kind"], NAME] = manifest  # type: ignore[index]
            if isinstance(action, SetStatus):
                self.pool["status"] = dict(action.status)
        labels = self.template["metadata"]["labels"]
        pods = tuple(
            Pod(
                name=f"{NAME}-{n}",
                uid=f"u{n}",
                ordinal=n,
                template=labels["millrace.dev/template"],
                revision=labels["millrace.dev/revision"],
                ready=True,
            )
            for n in range(size)
        )
        self.see(pods=pods, instances={p.name: held(0) for p in pods})
        self.carry_out()

    @property
    def template(self) -> dict[str, Any]:
        return self.observed.live["StatefulSet", NAME]["spec"]["template"]

    def see(self, **what: Any) -> None:
        """The wall clock goes with `now_s`."""
        if "now_s" in what:
            what.setdefault("unix_s", what["now_s"])
        self.observed = replace(self.observed, **what)

    def look(self) -> list[Any]:
        seen = timed_by_status(self.observed, self.pool.get("status", {}))
        return reconcile_pool(parse_pool(self.pool), seen, DEFAULTS)

    def carry_out(self) -> list[Any]:
        """Runs a pass, with the status and the cordons carried out."""
        actions = self.look()
        for action in actions:
            if isinstance(action, SetStatus):
                self.pool["status"] = dict(action.status)
                jsonschema.validate(self.pool, SCHEMAS[self.pool["kind"]])
            if isinstance(action, Cordon | Uncordon):
                known = self.observed.instances[action.instance_id]
                cordoned = isinstance(action, Cordon)
                self.knows(action.instance_id, replace(known, cordoned=cordoned))
        return actions

    def knows(self, name: str, instance: Registration) -> None:
        self.see(instances={**(self.observed.instances or {}), name: instance})

    def pod(self, ordinal: int, **what: Any) -> None:
        pods = [replace(p, **what) if p.ordinal == ordinal else p for p in self.observed.pods]
        self.see(pods=tuple(pods))

    def condition(self, kind: str) -> tuple[str, str]:
        found = by_type(self.pool["status"])[kind]
        return found["status"], found["reason"]


def timed_by_status(observed: ObservedPool, status: Mapping[str, Any]) -> ObservedPool:
    """Adds since when what the status says holds, for a clock that is exactly the wall clock."""
    last = by_type(status).get("Progressing")
    drains = {
        (entry["pod"], entry["uid"]): seconds(entry["since"])
        for entry in status.get("draining", ())
    }
    return replace(
        observed,
        draining_since_s=drains,
        progressing_since_s=seconds(last["lastTransitionTime"]) if last else math.inf,
    )


def held(requests: int, *, cordoned: bool = False) -> Registration:
    return Registration(cordoned=cordoned, held_requests=requests)


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def size(actions: list[Any]) -> int | None:
    """Returns the size that a StatefulSet is given."""
    found = [a.manifest for a in actions if isinstance(a, Apply)]
    return next((m["spec"]["replicas"] for m in found if m["kind"] == "StatefulSet"), None)


def reasons(actions: list[Any]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Report)]
