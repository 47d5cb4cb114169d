"""Observes the objects around an object, and carries out the actions of `reconcile`.

Both can be repeated: the next pass sees the effects. Durations are measured by a monotonic clock
(`sightings`); the wall clock is only shown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from millrace.core.autoscale.drain import Cordon, Evict, Registration, Uncordon
from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import (
    POOL_LABEL,
    SCHEDULER_PORT,
    SERVICE_LABEL,
    part_name,
)
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.observed import (
    Object,
    ObservedPool,
    ObservedService,
    Peer,
    Pool,
    Service,
    service_of,
)
from millrace_operator.reconcile.actions import (
    Action,
    Apply,
    Delete,
    Report,
    SetReplicas,
    SetStatus,
)
from millrace_operator.reconcile.pod_state import (
    all_available,
    finished,
    groups_of,
    pods_of,
    troubles_of,
)
from millrace_operator.run.children import Children
from millrace_operator.run.events import Events
from millrace_operator.run.kube import Kube
from millrace_operator.run.load import Schedulers
from millrace_operator.run.queue import Key
from millrace_operator.run.quota import room
from millrace_operator.run.scaler import ScaledPool, Scaler, View
from millrace_operator.run.sightings import Sightings
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import SpecError, autoscale_config, followed, pods_of_an_instance

log = logging.getLogger(__name__)

_POOL_CHILDREN = ("StatefulSet", "Service", "PodDisruptionBudget")
_LEADER_WORKER_SET = "LeaderWorkerSet"
_SERVICE_CHILDREN = ("ConfigMap", "Deployment", "Service", "PodDisruptionBudget")

#: The longest time in seconds between two reads of a pool's neighbours. A pool is reconciled once
#: per interval for its load; its neighbours are read again when they change, and at least this
#: often: not all of them are watched.
READ_AGAIN_S = 30.0


class NotLeading(MillraceError):
    """Another operator may act now."""


def scheduler_address(namespace: str, service: str) -> str:
    """Returns a scheduler's address inside the cluster."""
    return f"{part_name(service, 'scheduler')}.{namespace}.svc:{SCHEDULER_PORT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The clients through which the operator acts."""

    kube: Kube
    schedulers: Schedulers
    scaler: Scaler
    metrics: OperatorMetrics
    leads: Callable[[], bool]  # asked before every change
    identity: str  # of this operator, in Events
    address: Callable[[str, str], str] = scheduler_address  # by namespace and service
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = lambda: datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The API server's answers about the objects around a pool."""

    service: Object | None
    pools: list[dict[str, Any]]  # pools of the same service
    quotas: list[dict[str, Any]]
    pods: list[dict[str, Any]]
    children: list[list[dict[str, Any]]]
    read_s: float


class Cluster:
    """All objects of the operator."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._kube = parts.kube
        self._children = Children(parts.kube)
        self._events = Events(parts.kube, parts.identity)
        self._sightings = Sightings(parts.clock)
        self._uids: dict[Key, str] = {}
        self._rounds: dict[Key, _Round] = {}
        self._reading: set[Key] = set()  # being read, and unchanged since the read began
        self.has_leader_worker_sets = False  # whether the API server serves them

    async def get(self, key: Key) -> dict[str, Any] | None:
        """Returns the object; None, and forgets it, when it is gone or being deleted."""
        obj = await self._kube.get(key.kind, key.namespace, key.name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._forget(key)
            return None
        self._uids[key] = obj["metadata"]["uid"]
        return obj

    def now_s(self) -> float:
        """Returns unix seconds."""
        return self._parts.wall()

    async def observe_service(self, service: Service) -> ObservedService:
        """Observes the objects around a ModelService."""
        namespace, name = service.metadata["namespace"], service.name
        selector = f"{SERVICE_LABEL}={name},!{POOL_LABEL}"
        lists = [self._kube.list(kind, namespace, selector) for kind in _SERVICE_CHILDREN]
        *children, pools = await asyncio.gather(*lists, self._pools(namespace, name))
        live = self._children.by_name(service.metadata["uid"], [*children, pools])
        names = [one.service for one in service.spec.gateway.models or ()]
        found = await asyncio.gather(
            *(self._kube.get("ModelService", namespace, one) for one in names)
        )
        return ObservedService(
            live=live,
            listed={one: obj for one, obj in zip(names, found, strict=True) if obj is not None},
            troubles=await self._troubles(namespace, selector, live),
            now_s=self._parts.wall(),
        )

    async def _troubles(
        self, namespace: str, selector: str, live: Mapping[tuple[str, str], Object]
    ) -> Mapping[str, str]:
        """Returns why pods of Deployments do not start; reads the pods only if some are missing."""
        deployments = [child for (kind, _), child in live.items() if kind == "Deployment"]
        if all(map(all_available, deployments)):
            return {}
        return troubles_of(await self._kube.list("Pod", namespace, selector))

    async def observe_pool(self, pool: Pool) -> ObservedPool:
        """Observes the objects around a pool, and runs its autoscaler."""
        namespace, name, uid = (pool.metadata[part] for part in ("namespace", "name", "uid"))
        found = await self._round(pool)
        live = self._children.by_name(uid, found.children)
        quota = _room(pool, live, found)
        view, error = await self._think(pool, found.service, quota)
        pods = (pods_of if pool.spec.stage_pods == "Shared" else groups_of)(name, found.pods)
        seen = self._sightings.look(uid, pool.status, pods)
        metrics = view.metrics if view else None
        if view and metrics:
            metrics = replace(metrics, sampled_s=seen.now_s - view.age_s)
        return ObservedPool(
            service=found.service,
            live=live,
            pods=seen.pods,
            has_leader_worker_sets=self.has_leader_worker_sets,
            instances=await self._instances(namespace, found.service),
            peers=tuple(Peer.of(one) for one in found.pools if one["metadata"]["uid"] != uid),
            metrics=metrics,
            recommendation=view.recommendation if view else None,
            metrics_error=error,
            draining_since_s=seen.draining_since_s,
            progressing_since_s=seen.progressing_since_s,
            now_s=seen.now_s,
            unix_s=self._parts.wall(),
        )

    def changed(self, key: Key) -> None:
        """Notes a change around the object: it is read again."""
        self._rounds.pop(key, None)
        self._reading.discard(key)

    async def _round(self, pool: Pool) -> _Round:
        namespace, name = pool.metadata["namespace"], pool.name
        key = Key(pool.kind, namespace, name)
        now_s = self._parts.clock()
        known = self._rounds.get(key)
        if known is not None and now_s - known.read_s < READ_AGAIN_S:
            return known
        service_name = pool.spec.service_ref.name
        selector = f"{POOL_LABEL}={name}"
        kinds = list(_POOL_CHILDREN)
        if self.has_leader_worker_sets and pool.spec.stage_pods == "Own":
            kinds.append(_LEADER_WORKER_SET)
        self._reading.add(key)
        service, pools, quotas, pods, *children = await asyncio.gather(
            self._kube.get("ModelService", namespace, service_name),
            self._pools(namespace, service_name),
            self._kube.list("ResourceQuota", namespace),
            self._kube.list("Pod", namespace, selector),
            *(self._kube.list(kind, namespace, selector) for kind in kinds),
        )
        found = _Round(
            service=service,
            pools=pools,
            quotas=quotas,
            pods=pods,
            children=children,
            read_s=now_s,
        )
        if key in self._reading:
            self._reading.remove(key)
            self._rounds[key] = found
        return found

    async def carry_out(self, obj: Object, actions: Sequence[Action]) -> None:
        """Carries out the actions in order; stops at the first failure.

        Raises KubeError, KubeRefused and SchedulerUnavailable; NotLeading before any change for
        which this operator has no right any more; and OwnerGone before a child of a deleted `obj`
        is made.
        """
        if any(isinstance(action, Apply | Delete) for action in actions):
            meta = obj["metadata"]
            self.changed(Key(obj["kind"], meta["namespace"], meta["name"]))
        for action in actions:
            if not self._parts.leads():
                raise NotLeading("another operator may lead: nothing is changed")
            await self._do(obj, action)

    async def _do(self, obj: Object, action: Action) -> None:
        kind, meta = obj["kind"], obj["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        match action:
            case Apply(manifest=manifest):
                await self._children.apply(obj, manifest)
            case Delete():
                await self._kube.delete(action.kind, namespace, action.name, action.uid)
            case SetReplicas(replicas=replicas):
                await self._kube.scale(kind, namespace, name, replicas)
                up = replicas > obj["spec"].get("replicas", 0)
                pool = f"{namespace}/{name}"
                self._parts.metrics.scalings.labels(kind, pool, "up" if up else "down").inc()
                log.info("%s %s/%s: %d replicas", kind, namespace, name, replicas)
            case Cordon() | Uncordon():
                await self._parts.schedulers.cordon(
                    self._address(obj), action.instance_id, cordoned=isinstance(action, Cordon)
                )
            case Evict():
                await self._parts.schedulers.evict(
                    self._address(obj), action.instance_id, abort=action.abort
                )
            case SetStatus(status=status):
                if status != obj.get("status"):
                    await self._kube.patch_status(obj, status)
                if kind in KINDS:
                    self._sightings.wrote(meta["uid"], status)
            case Report():
                await self._events.post(obj, action)

    async def _pools(self, namespace: str, service: str) -> list[dict[str, Any]]:
        """Returns all pools of a service: its own, and others that refer to it."""
        lists = await asyncio.gather(*(self._kube.list(kind, namespace) for kind in KINDS))
        return [
            pool
            for pools in lists
            for pool in pools
            if service_of(pool) == service and "deletionTimestamp" not in pool["metadata"]
        ]

    async def _instances(
        self, namespace: str, service: Object | None
    ) -> Mapping[str, Registration] | None:
        if service is None:
            return None
        address = self._parts.address(namespace, service["metadata"]["name"])
        return await self._parts.schedulers.instances(address)

    async def _think(
        self, pool: Pool, service: Object | None, quota: int | None
    ) -> tuple[View | None, str]:
        """Returns the autoscaler's view, and why it has no fresh sample."""
        if service is None:
            return None, f"there is no ModelService {pool.spec.service_ref.name}"
        try:
            config = autoscale_config(pool.spec)
        except SpecError as error:
            return None, str(error)
        kind, meta = pool.kind, pool.metadata
        view = await self._parts.scaler.view(
            ScaledPool(
                uid=meta["uid"],
                role=pool.spec.role,
                scheduler=self._parts.address(meta["namespace"], pool.spec.service_ref.name),
                config=config,
                interval_s=float(pool.spec.autoscaling.interval_seconds),
                wanted=pool.spec.replicas,
                quota=quota,
                followed=partial(followed, pool.spec),
            )
        )
        gauge = self._parts.metrics.recommended.labels(kind, f"{meta['namespace']}/{meta['name']}")
        gauge.set(view.recommendation.replicas)
        return view, view.error

    def _address(self, pool: Object) -> str:
        return self._parts.address(
            pool["metadata"]["namespace"], pool["spec"]["serviceRef"]["name"]
        )

    def _forget(self, key: Key) -> None:
        self.changed(key)
        uid = self._uids.pop(key, "")
        self._children.forget(uid)
        self._sightings.forget(uid)
        if key.kind in KINDS:
            self._parts.scaler.forget(uid)
            self._parts.metrics.forget(key.kind, f"{key.namespace}/{key.name}")
        else:
            self._parts.schedulers.forget(self._parts.address(key.namespace, key.name))


def _room(pool: Pool, live: Mapping[tuple[str, str], Object], around: _Round) -> int | None:
    """Returns the number of instances for which the namespace's quotas have room."""
    pods = pods_of_an_instance(pool.spec)
    existing = sum(not finished(pod) for pod in around.pods) // pods
    for (kind, _), child in live.items():
        if kind == "StatefulSet":
            return room(around.quotas, child["spec"]["template"], existing, pods)
        if kind == _LEADER_WORKER_SET:
            template = child["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            return room(around.quotas, template, existing, pods)
    return None
