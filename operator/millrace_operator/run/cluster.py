"""Observes the objects around an object, and carries out the actions of `reconcile`.

Both can be repeated: the next pass sees the effects. The scaler uses a monotonic clock; `reconcile`
gets unix seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from millrace.core.autoscale.drain import Cordon, Evict, Registration, Uncordon
from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import (
    APPLIED,
    MANAGER,
    POOL_LABEL,
    SCHEDULER_PORT,
    SERVICE_LABEL,
    part_name,
)
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.observed import Object, ObservedPool, ObservedService, Peer, Pool, Service
from millrace_operator.reconcile.actions import (
    Action,
    Apply,
    Delete,
    Report,
    SetReplicas,
    SetStatus,
)
from millrace_operator.reconcile.pod_state import finished, pods_of
from millrace_operator.run.kube import RESOURCES, Kube, KubeRefused, micro_time
from millrace_operator.run.load import Schedulers
from millrace_operator.run.queue import Key
from millrace_operator.run.quota import room
from millrace_operator.run.scaler import ScaledPool, Scaler, View
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import SpecError, autoscale_config, followed

log = logging.getLogger(__name__)

_POOL_CHILDREN = ("StatefulSet", "Service", "PodDisruptionBudget")
_SERVICE_CHILDREN = ("ConfigMap", "Deployment", "Service", "PodDisruptionBudget")

#: Seconds after which the same Event on the same object is posted again.
EVENT_S = 600.0

#: The longest time in seconds between two reads of a pool's neighbours. A pool is reconciled once
#: per interval for its load; its neighbours are read again when they change, and at least this
#: often: not all of them are watched.
READ_AGAIN_S = 30.0


class NotLeading(MillraceError):
    """Another operator may act now."""


class OwnerGone(MillraceError):
    """The object was deleted during its pass: the operator makes nothing more for it."""


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
        #: Answers to the last apply, by the UIDs of owner and child: a differing object has
        #: drifted.
        self._applied: dict[str, dict[str, dict[str, Any]]] = {}
        self._uids: dict[Key, str] = {}
        self._rounds: dict[Key, _Round] = {}
        self._reading: set[Key] = set()  # being read, and unchanged since the read began
        self._posted: dict[tuple[str, str, str], float] = {}  # posted Events, by time

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
        names = [one.service for one in service.spec.gateway.models or ()]
        found = await asyncio.gather(
            *(self._kube.get("ModelService", namespace, one) for one in names)
        )
        return ObservedService(
            live=self._live(service.metadata["uid"], [*children, pools]),
            listed={one: obj for one, obj in zip(names, found, strict=True) if obj is not None},
            now_s=self._parts.wall(),
        )

    async def observe_pool(self, pool: Pool) -> ObservedPool:
        """Observes the objects around a pool, and runs its autoscaler."""
        namespace, name, uid = (pool.metadata[part] for part in ("namespace", "name", "uid"))
        found = await self._round(pool)
        live = self._live(uid, found.children)
        template = live.get(("StatefulSet", name), {}).get("spec", {}).get("template")
        existing = sum(not finished(pod) for pod in found.pods)
        quota = room(found.quotas, template, existing) if template else None
        view, error = await self._think(pool, found.service, quota)
        now_s = self._parts.wall()
        metrics = view.metrics if view else None
        return ObservedPool(
            service=found.service,
            live=live,
            pods=pods_of(name, found.pods),
            instances=await self._instances(namespace, found.service),
            peers=tuple(Peer.of(one) for one in found.pools if one["metadata"]["uid"] != uid),
            metrics=replace(metrics, sampled_s=now_s - view.age_s) if view and metrics else None,
            recommendation=view.recommendation if view else None,
            metrics_error=error,
            now_s=now_s,
        )

    def changed(self, key: Key) -> None:
        """Notes a change around the object: it is read again."""
        self._rounds.pop(key, None)
        self._reading.discard(key)

    async def _round(self, pool: Pool) -> _Round:
        namespace, name = pool.metadata["namespace"], pool.name
        key = Key(pool.kind, namespace, name)
        now_s = time.monotonic()
        known = self._rounds.get(key)
        if known is not None and now_s - known.read_s < READ_AGAIN_S:
            return known
        service_name = pool.spec.service_ref.name
        selector = f"{POOL_LABEL}={name}"
        self._reading.add(key)
        service, pools, quotas, pods, *children = await asyncio.gather(
            self._kube.get("ModelService", namespace, service_name),
            self._pools(namespace, service_name),
            self._kube.list("ResourceQuota", namespace),
            self._kube.list("Pod", namespace, selector),
            *(self._kube.list(kind, namespace, selector) for kind in _POOL_CHILDREN),
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
                await self._apply(obj, manifest)
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
            case Report():
                await self._report(obj, action)

    async def _apply(self, owner: Object, manifest: Mapping[str, Any]) -> None:
        """Applies a manifest, but only onto an object of the owner: a force apply would take any
        object.

        An apply makes a missing object. An existing child is applied by its UID, so that the API
        server refuses to make it again if it was deleted since. Before a child is made or taken
        over, the owner is read again, as Kubernetes' own controllers do. If the owner is deleted
        even later, the child's ownerReference names the UID of the deleted owner, and the garbage
        collector removes the child.
        """
        meta = manifest["metadata"]
        where = manifest["kind"], meta.get("namespace", ""), meta["name"]
        there = await self._kube.get(*where)
        if there is not None and not _is_child(there, owner):
            raise KubeRefused(f"{where[0]} {where[2]} exists and is not the operator's", status=409)
        if there is None or not _controllers(there):
            await self._check_exists(owner)
        if there is not None:
            manifest = {**manifest, "metadata": {**meta, "uid": there["metadata"]["uid"]}}
        applied = await self._kube.apply(manifest)
        children = self._applied.setdefault(owner["metadata"]["uid"], {})
        children[applied["metadata"]["uid"]] = _asked(applied)

    async def _check_exists(self, owner: Object) -> None:
        """Raises OwnerGone when the object with the owner's UID is gone or being deleted."""
        kind, meta = owner["kind"], owner["metadata"]
        now = await self._kube.get(kind, meta["namespace"], meta["name"])
        found = now["metadata"] if now is not None else {}
        if found.get("uid") != meta["uid"] or "deletionTimestamp" in found:
            raise OwnerGone(f"{kind} {meta['namespace']}/{meta['name']} was deleted")

    async def _report(self, obj: Object, report: Report) -> None:
        """Posts an Event, unless the same Event was posted lately. A failure is only logged."""
        meta, now_s = obj["metadata"], time.monotonic()
        event = (meta["uid"], report.reason, report.message)
        self._posted = {e: at_s for e, at_s in self._posted.items() if now_s - at_s < EVENT_S}
        if event in self._posted:
            return
        self._posted[event] = now_s
        about = {name: meta[name] for name in ("name", "namespace", "uid")}
        manifest = {
            "apiVersion": RESOURCES["Event"].api_version,
            "kind": "Event",
            "metadata": {
                "name": f"{meta['name']}.{uuid.uuid4().hex[:16]}",
                "namespace": meta["namespace"],
            },
            "eventTime": micro_time(),
            "type": "Warning" if report.warning else "Normal",
            "reason": report.reason,
            "action": "Reconcile",
            "note": report.message[:1024],
            "reportingController": f"millrace.dev/{MANAGER}",
            "reportingInstance": self._parts.identity,
            "regarding": {"apiVersion": obj["apiVersion"], "kind": obj["kind"], **about},
        }
        try:
            await self._kube.create(manifest)
        except MillraceError as error:
            log.warning("an Event was not posted: %s", error)

    async def _pools(self, namespace: str, service: str) -> list[dict[str, Any]]:
        """Returns all pools of a service: its own, and others that refer to it."""
        lists = await asyncio.gather(*(self._kube.list(kind, namespace) for kind in KINDS))
        return [
            pool
            for pools in lists
            for pool in pools
            if pool["spec"]["serviceRef"]["name"] == service
            and "deletionTimestamp" not in pool["metadata"]
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

    def _live(
        self, owner_uid: str, lists: Iterable[Iterable[dict[str, Any]]]
    ) -> dict[tuple[str, str], Object]:
        """Returns objects by kind and name. An object that others changed loses the mark of its
        last apply.
        """
        applied = self._applied.get(owner_uid, {})
        return {
            (obj["kind"], obj["metadata"]["name"]): _checked(obj, applied)
            for objects in lists
            for obj in objects
        }

    def _forget(self, key: Key) -> None:
        self.changed(key)
        uid = self._uids.pop(key, "")
        self._applied.pop(uid, None)
        if key.kind in KINDS:
            self._parts.scaler.forget(uid)
            self._parts.metrics.forget(key.kind, f"{key.namespace}/{key.name}")
        else:
            self._parts.schedulers.forget(self._parts.address(key.namespace, key.name))


def _checked(obj: dict[str, Any], applied: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the object, without the mark of its last apply if it has changed since."""
    meta = obj["metadata"]
    if APPLIED not in meta.get("annotations", {}) or applied.get(meta["uid"]) == _asked(obj):
        return obj
    annotations = {k: v for k, v in meta["annotations"].items() if k != APPLIED}
    return {**obj, "metadata": {**meta, "annotations": annotations}}


def _is_child(obj: Object, owner: Object) -> bool:
    """Returns whether the owner controls the object, or may take it over from a deleted owner of
    its name.
    """
    if controllers := _controllers(obj):
        return controllers == [owner["metadata"]["uid"]]
    labels = obj["metadata"].get("labels", {})
    return bool(labels.get("app.kubernetes.io/managed-by") == MANAGER)


def _controllers(obj: Object) -> list[str]:
    """Returns the UID of the object's controller, if it has one."""
    references = obj["metadata"].get("ownerReferences", [])
    return [ref["uid"] for ref in references if ref.get("controller")]


def _asked(obj: Object) -> dict[str, Any]:
    """Returns the wanted fields: all but the status and the API server's bookkeeping."""
    books = ("resourceVersion", "managedFields")
    meta = {name: value for name, value in obj["metadata"].items() if name not in books}
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": meta}
