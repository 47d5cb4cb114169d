"""Replacing instances of an old template, one at a time, without losing capacity.

An extra instance starts first (rollout.maxSurge), so that `replicas` instances serve throughout.
Then one old instance after the other drains and is deleted; its StatefulSet makes it anew.

Instances of two revisions of the model exchange no KV. So when the revision changes, the pools of
a service go together:

- none drains an old instance before every other pool has a new one ready, nor while another pool
  has come less far, by shares of their instances;
- none drains the last instance of the last revision that all pools have, not even where a revision
  follows the other before the first is out.

Without an extra instance each pool's first new one needs an old one's place, and waits for nobody.

A pool that shrinks meanwhile keeps one instance beyond its size, which of those that stay none can
stand in for (`Rollout.kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace_operator.observed import Peer, Pod
from millrace_operator.reconcile.drain import Rules

#: An old pod that has not been ready this long is replaced at once: it is no capacity.
BROKEN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The pool's pods against the template that they are to have."""

    template: str
    revision: str
    replicas: int  # wanted
    max_surge: int
    pods: Sequence[Pod]
    peers: Sequence[Peer]
    under_way: bool  # by the last status
    doubted: frozenset[Pod] = frozenset()  # perhaps still cordoned (`Rules.doubted`)
    now_s: float

    @property
    def surge(self) -> int:
        """Extra instances now."""
        return self.max_surge if self.active else 0

    @property
    def active(self) -> bool:
        """While an old instance is left, and until all new ones are ready."""
        if not self.replicas:
            return False
        old = any(not self._new(pod) for pod in self._wanted())
        return old or (self.under_way and len(self._wanted_ready()) < self.replicas)

    @property
    def size(self) -> int:
        """Pods that the StatefulSet is to have, but for those that still drain."""
        return self.replicas + self.surge

    @property
    def kept(self) -> Pod | None:
        """Whom a smaller size has to wait for.

        The first beyond it of a revision that all pools serve, where the rest has none. Or the
        first new one, where the rest is one old instance that is to go without an extra one.
        """
        if not self.replicas:
            return None
        rest = self._within()
        beyond = [pod for pod in self.pods if pod.ordinal >= self.size and _is_up(pod)]
        common = self._common([*rest, *beyond])
        if common.isdisjoint(pod.revision for pod in rest):
            fit = [pod for pod in beyond if pod.revision in common]
        elif self.size == 1 and not self._new(rest[0]):
            fit = [pod for pod in beyond if self._new(pod)]
        else:
            return None
        return min(fit, key=lambda pod: pod.ordinal, default=None)

    def _common(self, pods: Sequence[Pod]) -> set[str]:
        """Revisions of `pods` that all other pools serve, too."""
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
        """Old pods that do not serve: replaced without waiting for anybody."""
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
        """The old pod that drains now: one that does already goes on."""
        old = sorted(self._old(), key=lambda pod: (rules.drains(pod), pod.ordinal), reverse=True)
        return next((pod for pod in old if not self._blocked(pod)), None)

    def waits_for(self) -> str:
        """Why no old pod drains, or ""."""
        reasons = [self._blocked(pod) for pod in self._old()]
        return reasons[0] if all(reasons) and reasons else ""

    def _old(self) -> list[Pod]:
        """Old pods that are up; a rollout takes them one by one."""
        within = (pod for pod in self.pods if pod.ordinal < self.size)
        return [pod for pod in within if not self._new(pod) and _is_up(pod)]

    def _within(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ordinal < self.size and self._serves(pod)]

    def _serving(self) -> list[Pod]:
        kept = self.kept
        return self._within() + ([kept] if kept is not None and self._serves(kept) else [])

    def _serves(self, pod: Pod) -> bool:
        return _is_up(pod) and pod not in self.doubted

    def _blocked(self, pod: Pod) -> str:
        """Why an old pod has to stay for now, or ""."""
        others = [other for other in self._serving() if other != pod]
        least = self.replicas - (1 - self.max_surge)
        if len(others) < least:
            return f"{len(others)} others take work of the {least} that have to meanwhile"
        if others and self._last_pair(pod, others):
            return f"the other pools have no other revision than {pod.revision} in common with it"
        if pod.revision == self.revision or self._no_slot():
            return ""
        behind = [peer.name for peer in self._peers() if not self._level(peer)]
        return f"{', '.join(behind)} has to come as far first" if behind else ""

    def _last_pair(self, pod: Pod, others: Sequence[Pod]) -> bool:
        """Whether no revision is left that all pools serve when `pod` leaves."""
        return bool(self._common([pod, *others])) and not self._common(others)

    def _no_slot(self) -> bool:
        """Whether old pods leave no place for a first new one: nobody has to be waited for then.

        So it is without an extra instance, or where that one is of an earlier, unfinished rollout.
        """
        there = [pod for pod in self.pods if pod.ordinal < self.size]
        none_new = not any(self._new(pod) for pod in [*there, *self._serving()])
        return len(there) == self.size and none_new

    def _level(self, peer: Peer) -> bool:
        """Whether the other pool has come as far as this one, by shares of its instances."""
        if peer.revision != self.revision or not peer.updated_ready:
            return False
        theirs = min(peer.updated_ready, peer.replicas) * self.replicas
        return theirs >= min(self.updated_ready(), self.replicas) * peer.replicas


def _is_up(pod: Pod) -> bool:
    return pod.ready and not pod.terminating
