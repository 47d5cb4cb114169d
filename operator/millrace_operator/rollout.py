"""Replacing instances of an old template, one at a time, without losing capacity.

An extra instance starts first (rollout.maxSurge), so that `replicas` instances serve throughout.
Then one old instance after the other drains and is deleted; its StatefulSet makes it anew. When
the model's revision changes, instances of the old and of the new revision exchange no KV, so the
pools of a service go together: none drains an old instance before every other pool has a new one
ready, nor while another pool has come less far. Each revision always has prefill and decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace_operator.drain import Rules
from millrace_operator.observed import Peer, Pod

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
    now_s: float

    @property
    def surge(self) -> int:
        """Extra instances now: while an old one is left, and until all new ones are ready."""
        old = any(not self._new(pod) for pod in self._wanted())
        unfinished = self.under_way and len(self._wanted_ready()) < self.replicas
        return self.max_surge if self.replicas and (old or unfinished) else 0

    @property
    def active(self) -> bool:
        if not self.replicas:
            return False
        old = any(not self._new(pod) for pod in self._wanted())
        return old or (self.under_way and len(self._wanted_ready()) < self.replicas)

    @property
    def size(self) -> int:
        """Pods that the StatefulSet is to have, but for those that still drain."""
        return self.replicas + self.surge

    def _wanted(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ordinal < self.replicas]

    def _wanted_ready(self) -> list[Pod]:
        return [pod for pod in self._wanted() if self._new(pod) and _serves(pod)]

    def _new(self, pod: Pod) -> bool:
        return pod.template == self.template

    def updated_ready(self) -> int:
        return sum(self._new(pod) and _serves(pod) for pod in self.pods)

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
        old = [
            pod
            for pod in self.pods
            if pod.ordinal < self.size and not self._new(pod) and _serves(pod)
        ]
        if not old:
            return None
        pod = max(old, key=lambda pod: (rules.drains(pod), pod.ordinal))
        return None if self.blocked(pod) else pod

    def waits_for(self) -> str:
        """Why no old pod drains, or ""."""
        old = [p for p in self.pods if p.ordinal < self.size and not self._new(p) and _serves(p)]
        reasons = [self.blocked(pod) for pod in old]
        return reasons[0] if reasons and all(reasons) else ""

    def blocked(self, pod: Pod) -> str:
        """Why an old pod has to stay for now, or ""."""
        others = sum(
            _serves(other) for other in self.pods if other.ordinal < self.size and other != pod
        )
        least = self.replicas - (1 - self.max_surge)
        if others < least:
            return f"{others} other instances are ready of the {least} that are to serve meanwhile"
        # Without an extra instance the first new one is an old one's successor.
        first = not self.max_surge and not self.updated_ready()
        if pod.revision == self.revision or first:
            return ""
        behind = [peer.name for peer in self.peers if peer.replicas and not self._level(peer)]
        return f"{', '.join(behind)} has to come as far first" if behind else ""

    def _level(self, peer: Peer) -> bool:
        """Whether the other pool has come as far as this one, by shares of its instances."""
        if peer.revision != self.revision or not peer.updated_ready:
            return False
        theirs = min(peer.updated_ready, peer.replicas) * self.replicas
        return theirs >= min(self.updated_ready(), self.replicas) * peer.replicas


def _serves(pod: Pod) -> bool:
    return pod.ready and not pod.terminating
