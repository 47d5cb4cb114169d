"""Connects `core.autoscale.drain` to Kubernetes: pods and the pool's status in, actions out.

The rule's Remove deletes a pod, or shrinks the StatefulSet past it. The pool's status keeps each
drain with the pod's UID, so a new pod of the same name starts a drain of its own. Its time is
measured by a clock that does not step (`run.sightings`), and the status keeps how long it has
waited: an operator that takes over counts on from there, whatever its wall clock says.

An instance that is wanted again takes work once the scheduler confirms it. If the scheduler does
not answer, or the instance is missing, its entry stays in the status as `returning`, and the
instance does not count as capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.autoscale import drain
from millrace_operator.observed import ObservedPool, Pod, Pool
from millrace_operator.reconcile.conditions import timestamp

#: The longest eviction in seconds. Then the pod is deleted: at SIGTERM it drains by itself.
EVICTION_S = 60.0

#: The status is written once in so many seconds of a drain: so much of it a new operator may wait
#: again.
KEPT_EVERY_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A pod that will be removed."""

    pod: Pod
    since: str  # a time of the API, to be shown
    since_s: float  # the same by the operator's clock
    kept_s: int  # how long it has waited, in steps of KEPT_EVERY_S, until nothing depends on it
    reason: str  # ScaleIn | Rollout | StageLeaves | Retired
    timed_out: bool
    held: int  # requests; 0 if the scheduler does not know the pod, or does not answer
    removed: bool = False  # by this pass, or an earlier one

    @property
    def is_replaced(self) -> bool:
        """Whether a successor starts in its place."""
        return self.reason in ("Rollout", "StageLeaves")

    def entry(self) -> dict[str, Any]:
        """Returns its entry of status.draining."""
        return {
            "pod": self.pod.name,
            "uid": self.pod.uid,
            "since": self.since,
            "reason": self.reason,
            **({"waitedSeconds": self.kept_s} if self.kept_s else {}),
            **({"timedOut": True} if self.timed_out else {}),
            **({"removed": True} if self.removed else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A pool's drain settings, and the draining pods that are known."""

    policy: drain.DrainPolicy
    known: Mapping[tuple[str, str], Mapping[str, Any]]  # (pod, uid) -> entry of status.draining
    back: Mapping[tuple[str, str], Mapping[str, Any]]  # the entries that say `returning`
    observed: ObservedPool

    @classmethod
    def of(cls, pool: Pool, observed: ObservedPool) -> Rules:
        entries = {
            (entry["pod"], entry.get("uid", "")): entry for entry in pool.status.get("draining", [])
        }
        spec = pool.spec.drain
        return cls(
            policy=drain.DrainPolicy(
                timeout_s=float(spec.timeout_seconds),
                eviction_s=EVICTION_S,
                on_timeout=drain.OnTimeout(spec.on_timeout),
            ),
            known={key: e for key, e in entries.items() if not e.get("returning")},
            back={key: e for key, e in entries.items() if e.get("returning")},
            observed=observed,
        )

    @property
    def instances(self) -> Mapping[str, drain.Registration] | None:
        return self.observed.instances

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
        now_s, key = self.observed.now_s, (pod.name, pod.uid)
        since_s = self.observed.draining_since_s.get(key, now_s) if entry else now_s
        most_s = self.policy.timeout_s + self.policy.eviction_s
        instance = (self.instances or {}).get(pod.name)
        return Leaving(
            pod=pod,
            since=entry["since"] if entry else timestamp(self.observed.unix_s),
            since_s=since_s,
            kept_s=int(min(now_s - since_s, most_s) // KEPT_EVERY_S * KEPT_EVERY_S),
            reason=reason,
            timed_out=self.policy.is_over(since_s, now_s),
            held=instance.held_requests if instance else 0,
        )

    def still(self, pods: Iterable[Pod]) -> list[Leaving]:
        """Returns the pods that drained before, for a pass that changes nothing."""
        return [
            self.leaving(pod, self.known[pod.name, pod.uid].get("reason", "ScaleIn"))
            for pod in pods
            if self.drains(pod)
        ]

    def actions(self, pods: Iterable[Pod], leaving: Iterable[Leaving]) -> list[drain.Action]:
        """Returns the rule's actions. A terminating pod gets none: it ends by itself."""
        since_s = {one.pod.name: one.since_s for one in leaving}
        known = self.instances or {}
        return drain.drain_actions(
            [
                drain.Instance(
                    id=pod.name,
                    ready=pod.ready,
                    leaves_since_s=since_s.get(pod.name),
                    registration=known.get(pod.name),
                )
                for pod in pods
                if not pod.terminating
            ],
            self.policy,
            self.observed.now_s,
            scheduler_answers=self.instances is not None,
        )
