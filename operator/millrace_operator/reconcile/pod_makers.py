"""The objects that make a pool's pods: one StatefulSet, or a group per instance.

A group (`group_objects`) has one object that makes the pod of its first stage: a LeaderWorkerSet
where the cluster has them, else a StatefulSet. An object keeps its kind and its template for as
long as it lives; a group is replaced by a deletion of the object, and the next pass makes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace_operator.manifests.group_objects import (
    LEADER_WORKER_SET,
    STATEFUL_SET,
    group_object,
    later_stages,
)
from millrace_operator.manifests.instances import Groups, Template, instance
from millrace_operator.manifests.naming import TEMPLATE_LABEL
from millrace_operator.manifests.objects import Manifest, stateful_set
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import Object, ObservedPool, Pod, Pool
from millrace_operator.reconcile.actions import Delete
from millrace_operator.reconcile.drain import Leaving


class PodMakers(Protocol):
    """The objects that make a pool's pods, as observed, and as they should be."""

    @property
    def template(self) -> str:
        """Returns the hash of the wanted template, which pods have as a label."""

    @property
    def size(self) -> int:
        """Returns the number of instances, by the observed objects."""

    def wanted(self, size: int) -> list[Manifest]:
        """Returns the objects for `size` instances, as far as they may be made now."""

    def deletions(self, size: int, leaving: Sequence[Leaving]) -> list[Delete]:
        """Returns the deletions by which removed instances go, beside a smaller size."""


def pod_makers(pool: Pool, context: Context, observed: ObservedPool) -> PodMakers:
    """Raises SpecError."""
    if pool.spec.stage_pods == "Shared":
        live = observed.live.get((STATEFUL_SET, pool.name))
        return _OneSet(pool, instance(pool, context), live)
    return _GroupObjects(Groups.of(pool, context), observed)


@dataclass(frozen=True, slots=True)
class _OneSet:
    pool: Pool
    pod: Template
    live: Object | None

    @property
    def template(self) -> str:
        found: str = self.pod["metadata"]["labels"][TEMPLATE_LABEL]
        return found

    @property
    def size(self) -> int:
        return self.live["spec"]["replicas"] if self.live is not None else 0

    def wanted(self, size: int) -> list[Manifest]:
        return [stateful_set(self.pool, self.pod, size)]

    def deletions(self, size: int, leaving: Sequence[Leaving]) -> list[Delete]:
        """Deletes drained old pods, so that their successors start."""
        return [
            Delete(kind="Pod", name=one.pod.name, uid=one.pod.uid)
            for one in leaving
            if one.removed and one.is_replaced
        ]


@dataclass(frozen=True, slots=True)
class _GroupObjects:
    groups: Groups
    observed: ObservedPool

    @property
    def template(self) -> str:
        return self.groups.template

    @property
    def size(self) -> int:
        return 1 + max(self._live(), default=-1)

    def wanted(self, size: int) -> list[Manifest]:
        live, new = self._live(), STATEFUL_SET
        if self.observed.has_leader_worker_sets:
            new = LEADER_WORKER_SET
        found = []
        for ordinal in range(size):
            there = live.get(ordinal)
            if there is None or self._is_new(there):
                kind = new if there is None else there["kind"]
                found.append(group_object(self.groups, ordinal, kind))
        pods = {pod.ordinal: pod for pod in self.observed.pods}
        for ordinal, there in live.items():
            if there["kind"] == STATEFUL_SET and (pod := pods.get(ordinal)) is not None:
                found += self._later_stages(pod)
        return found

    def deletions(self, size: int, leaving: Sequence[Leaving]) -> list[Delete]:
        """Deletes groups beyond the size, and replaced groups."""
        replaced = {one.pod.ordinal for one in leaving if one.removed and one.is_replaced}
        return [
            Delete(
                kind=there["kind"],
                name=there["metadata"]["name"],
                uid=there["metadata"].get("uid", ""),
            )
            for ordinal, there in self._live().items()
            if ordinal >= size or ordinal in replaced
        ]

    def _live(self) -> dict[int, Object]:
        """Returns the groups' objects by ordinal."""
        prefix, found = f"{self.groups.pool.name}-", {}
        for (kind, name), there in self.observed.live.items():
            ordinal = name.removeprefix(prefix)
            if kind in (STATEFUL_SET, LEADER_WORKER_SET) and ordinal.isdecimal():
                found[int(ordinal)] = there
        return found

    def _is_new(self, there: Object) -> bool:
        return bool(there["metadata"]["labels"].get(TEMPLATE_LABEL) == self.template)

    def _later_stages(self, first: Pod) -> list[Manifest]:
        """Makes them for a pod of the wanted template, once those of its predecessor are gone."""
        if first.terminating or first.template != self.template:
            return []
        there = self.observed.live.get((STATEFUL_SET, first.name))
        owners = [] if there is None else there["metadata"].get("ownerReferences", [])
        if any(owner["uid"] != first.uid for owner in owners):
            return []
        return [later_stages(self.groups, first)]
