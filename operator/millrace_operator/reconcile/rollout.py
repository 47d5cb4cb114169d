"""Replaces instances of an old template, one at a time, without losing capacity.

An extra instance starts first (rollout.maxSurge), so that `replicas` instances serve throughout.
Then the old instances drain one by one and are deleted; the StatefulSet makes each pod again.

Instances of two revisions of the model exchange no KV. So when the revision changes, the pools of a
service proceed together:

- A pool drains an old instance only after every other pool has a new instance ready, and no other
  pool has a smaller share of new instances.
- No pool drains the last instance of the last revision that all pools have, even if a new revision
  starts before the last rollout has ended.

Without an extra instance, each pool's first new instance takes an old instance's place and does not
wait for other pools.

If a pool shrinks during a rollout, it keeps one instance beyond its size if no remaining instance
can replace that instance (`Rollout.kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace_operator.observed import Peer, Pod
from millrace_operator.reconcile.drain import Rules

#: Seconds after which an old pod that is not ready is replaced at once: it is no capacity.
BROKEN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Compares the pool's pods with their wanted template."""

    template: str
    revision: str
    replicas: int  # wanted
    max_surge: int
    pods: Sequence[Pod]
    peers: Sequence[Peer]
    under_way: bool  # by the last status
    doubted: frozenset[Pod] = frozenset()  # pods that may still be cordoned (`Rules.doubted`)
    now_s: float

    @property
    def active(self) -> bool:
        """Returns True while an old instance is left, and until all new instances are ready."""
        if not self.replicas:
            return False
        old = any(not self._new(pod) for pod in self._wanted())
        return old or (self.under_way and len(self._wanted_ready()) < self.replicas)

    @property
    def size(self) -> int:
        """Returns the StatefulSet's size, without pods that still drain."""
        return self.replicas + (self.max_surge if self.active else 0)

    @property
    def kept(self) -> Pod | None:
        """Returns the pod that a smaller size has to wait for, or None.

        It is the first pod beyond the size with a revision that all pools serve, if no remaining
        pod has such a revision. Or it is the first new pod, if the only remaining instance is old
        and is replaced without an extra instance.
        """
        if not self.replicas:
            return None
        rest = self._within()
        beyond = [pod for pod in self.pods if pod.ordinal >= self.size and _stays_up(pod)]
        common = self._common([*rest, *beyond])
        if common.isdisjoint(pod.revision for pod in rest):
            fit = [pod for pod in beyond if pod.revision in common]
        elif self.size == 1 and not self._new(rest[0]):
            fit = [pod for pod in beyond if self._new(pod)]
        else:
            return None
        return min(fit, key=lambda pod: pod.ordinal, default=None)

    def _common(self, pods: Sequence[Pod]) -> set[str]:
        """Returns the revisions of `pods` that all other pools serve, too."""
        found = {pod.revision for pod in pods}
        return found.intersection(*(peer.serving for peer in self._peers()))

    def _peers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.replicas]

    def _wanted(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ordinal < self.replicas]

    def _wanted_ready(self) -> list[Pod]:
        return [pod for pod in self._wanted() if self._new(pod) and self._serves(pod)]

    def _new(self, pod: Pod) -> bool:
        return pod.template == self.template

    def updated_ready(self) -> int:
        return sum(self._new(pod) and self._serves(pod) for pod in self.pods)

    def broken(self) -> list[Pod]:
        """Returns old pods that do not serve: they are replaced at once."""
        return [
            pod
            for pod in self.pods
            if pod.ordinal < self.size
            and not self._new(pod)
            and not pod.ready
            and not pod.terminating
            and (pod.trouble or self.now_s - pod.unready_since_s >= BROKEN_S)
        ]

    def next(self, rules: Rules) -> Pod | None:
        """Returns the old pod that drains now; a draining pod comes first."""
        old = sorted(self._old(), key=lambda pod: (rules.drains(pod), pod.ordinal), reverse=True)
        return next((pod for pod in old if not self._blocked(pod)), None)

    def waits_for(self) -> str:
        """Returns why no old pod drains, or ""."""
        reasons = [self._blocked(pod) for pod in self._old()]
        return reasons[0] if all(reasons) and reasons else ""

    def _old(self) -> list[Pod]:
        """Returns old pods that are up; a rollout takes them one by one."""
        within = (pod for pod in self.pods if pod.ordinal < self.size)
        return [pod for pod in within if not self._new(pod) and _is_up(pod)]

    def _within(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ordinal < self.size and self._serves(pod)]

    def _serving(self) -> list[Pod]:
        kept = self.kept
        return self._within() + ([kept] if kept is not None and self._serves(kept) else [])

    def _serves(self, pod: Pod) -> bool:
        return _stays_up(pod) and pod not in self.doubted

    def _blocked(self, pod: Pod) -> str:
        """Returns why an old pod has to stay for now, or ""."""
        others = [other for other in self._serving() if other != pod]
        least = self.replicas - (1 - self.max_surge)
        if len(others) < least:
            return f"{len(others)} others take work of the {least} needed"
        if others and self._last_pair(pod, others):
            return f"the other pools have no other revision than {pod.revision} in common with it"
        if pod.revision == self.revision or self._no_slot():
            return ""
        late = [peer.name for peer in self._peers() if not self._level(peer)]
        return f"{', '.join(late)} must first replace as large a share" if late else ""

    def _last_pair(self, pod: Pod, others: Sequence[Pod]) -> bool:
        """Returns whether all pools would share no revision once `pod` leaves."""
        return bool(self._common([pod, *others])) and not self._common(others)

    def _no_slot(self) -> bool:
        """Returns whether old pods leave no place for a first new pod: then the pool waits for no
        other pool.

        This is so without an extra instance, or when the extra instance is of an earlier,
        unfinished rollout.
        """
        there = [pod for pod in self.pods if pod.ordinal < self.size]
        none_new = not any(self._new(pod) for pod in [*there, *self._serving()])
        return len(there) == self.size and none_new

    def _level(self, peer: Peer) -> bool:
        """Returns whether the other pool has at least this pool's share of new instances."""
        if peer.revision != self.revision or not peer.updated_ready:
            return False
        theirs = min(peer.updated_ready, peer.replicas) * self.replicas
        return theirs >= min(self.updated_ready(), self.replicas) * peer.replicas


def _is_up(pod: Pod) -> bool:
    return pod.ready and not pod.terminating


def _stays_up(pod: Pod) -> bool:
    return _is_up(pod) and not pod.loses_stage
