"""Drains an instance: cordons it at the scheduler, empties it, and only then removes its pod.

A leaving instance gets no new work. Its pod is deleted once the scheduler reports that it holds no
requests. After drain.timeoutSeconds its requests are migrated (Migrate), end with an error (Abort),
or are waited for (Wait). The pool's status keeps the start of the drain with the pod's UID, so a
new pod of the same name starts a drain of its own.

An instance that is wanted again takes work once the scheduler confirms it. If the scheduler does
not answer, or the instance is missing, its entry stays in the status as `returning`, and the
instance does not count as capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace_operator.observed import Instance, Pod
from millrace_operator.reconcile.actions import Cordon, Evict
from millrace_operator.reconcile.conditions import seconds, timestamp

#: The longest eviction in seconds. Then the pod is deleted: at SIGTERM it drains by itself.
EVICTION_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A pod that will be removed."""

    pod: Pod
    since_s: float  # unix seconds
    reason: str  # ScaleIn | Rollout | Retired
    timed_out: bool
    instance: Instance | None  # None: the scheduler does not know it, or does not answer
    removable: bool  # nothing is lost with it, or its time is over
    removed: bool = False  # by this pass, or an earlier one

    @property
    def held(self) -> int:
        return self.instance.held_requests if self.instance else 0

    def entry(self) -> dict[str, Any]:
        """Returns its entry of status.draining."""
        return {
            "pod": self.pod.name,
            "uid": self.pod.uid,
            "since": timestamp(self.since_s),
            "reason": self.reason,
            **({"timedOut": True} if self.timed_out else {}),
            **({"removed": True} if self.removed else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A pool's drain settings, and the draining pods that are known."""

    timeout_s: float
    on_timeout: str  # Migrate | Abort | Wait
    known: Mapping[tuple[str, str], Mapping[str, Any]]  # (pod, uid) -> entry of status.draining
    back: Mapping[tuple[str, str], Mapping[str, Any]]  # the entries that say `returning`
    instances: Mapping[str, Instance] | None
    now_s: float

    @classmethod
    def of(
        cls, pool: Mapping[str, Any], instances: Mapping[str, Instance] | None, now_s: float
    ) -> Rules:
        entries = {
            (entry["pod"], entry.get("uid", "")): entry
            for entry in pool.get("status", {}).get("draining", [])
        }
        return cls(
            timeout_s=float(pool["spec"]["drain"]["timeoutSeconds"]),
            on_timeout=pool["spec"]["drain"]["onTimeout"],
            known={key: e for key, e in entries.items() if not e.get("returning")},
            back={key: e for key, e in entries.items() if e.get("returning")},
            instances=instances,
            now_s=now_s,
        )

    def drains(self, pod: Pod) -> bool:
        """Returns whether the pod was draining before this pass."""
        return (pod.name, pod.uid) in self.known

    def doubted(self, pods: Iterable[Pod]) -> frozenset[Pod]:
        """Returns pods that were cordoned and that the scheduler can't uncordon now."""
        return frozenset(
            pod
            for pod in pods
            if (pod.name, pod.uid) in {**self.known, **self.back}
            and not pod.terminating
            and not (pod.ready and self.instances is not None and pod.name in self.instances)
        )

    def returning(self, pods: Iterable[Pod], leaving: Iterable[Leaving]) -> list[dict[str, Any]]:
        """Returns the entries of status.draining for doubted pods that are wanted again."""
        leave = {one.pod for one in leaving}
        entries = {**self.known, **self.back}
        return [
            {
                "pod": pod.name,
                "uid": pod.uid,
                "since": entries[pod.name, pod.uid]["since"],
                "returning": True,
            }
            for pod in sorted(self.doubted(pods) - leave, key=lambda pod: pod.ordinal)
        ]

    def leaving(self, pod: Pod, reason: str) -> Leaving:
        entry = self.known.get((pod.name, pod.uid))
        since_s = seconds(entry["since"]) if entry else self.now_s
        waited_s = self.now_s - since_s
        instance = self.instances.get(pod.name) if self.instances is not None else None
        return Leaving(
            pod=pod,
            since_s=since_s,
            reason=reason,
            timed_out=waited_s >= self.timeout_s,
            instance=instance,
            removable=self._removable(pod, instance, waited_s),
        )

    def still(self, pods: Iterable[Pod]) -> list[Leaving]:
        """Returns the pods that drained before, for a pass that changes nothing."""
        return [
            self.leaving(pod, self.known[pod.name, pod.uid].get("reason", "ScaleIn"))
            for pod in pods
            if self.drains(pod)
        ]

    def _removable(self, pod: Pod, instance: Instance | None, waited_s: float) -> bool:
        if instance is not None and not instance.held_requests:
            # Until the scheduler has cordoned it, work may be in flight to it.
            return instance.cordoned or not pod.ready
        if self.instances is not None and instance is None and not pod.ready:
            return True  # starting, or lost: without its stream it has dropped its requests
        if self.on_timeout == "Wait":
            return False
        # A ready instance that the scheduler does not know will soon register again.
        grace_s = EVICTION_S if instance is not None else 0.0
        return waited_s >= self.timeout_s + grace_s

    def evictions(self, leaving: Iterable[Leaving]) -> list[Evict]:
        """Evicts instances whose drain time is over, in each pass until they hold nothing."""
        if self.on_timeout == "Wait":
            return []
        return [
            Evict(instance_id=one.pod.name, abort=self.on_timeout == "Abort")
            for one in leaving
            if one.timed_out and one.held
        ]

    def cordons(self, leaving: Iterable[Leaving], pods: Iterable[Pod]) -> list[Cordon]:
        """Returns the cordons that the scheduler lacks, without instances that end by
        themselves.
        """
        leave = {one.pod.name for one in leaving}
        known = self.instances or {}
        return [
            Cordon(instance_id=pod.name, cordoned=pod.name in leave)
            for pod in pods
            if pod.name in known
            and not pod.terminating
            and known[pod.name].cordoned != (pod.name in leave)
            and (pod.name in leave or pod.ready)
        ]
