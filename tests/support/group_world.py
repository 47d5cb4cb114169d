"""A simulated cluster whose instances have a pod per stage.

Beside `FleetWorld`, it has the controllers of groups: StatefulSets of first stages, StatefulSets of
later stages, which go with the pod that owns them, and LeaderWorkerSets. An instance is ready once
the pods of all its stages are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from millrace_operator.manifests.naming import (
    FIRST,
    POOL_LABEL,
    REVISION_LABEL,
    STAGE_LABEL,
    TEMPLATE_LABEL,
)
from millrace_operator.observed import Pod
from millrace_operator.reconcile.actions import Action, Delete
from support.fleet_world import FleetWorld, Node

STAGES = 3
_MAKERS = ("StatefulSet", "LeaderWorkerSet")


@dataclass(eq=False)
class GroupNode(Node):
    """The pod of an instance's first stage, and the pods of its later stages."""

    maker_uid: str = ""
    later_template: str = ""  # of the pods of the later stages; empty: there are none yet
    later_ready_at_s: float = math.inf
    loses_stage: bool = False

    @property
    def name(self) -> str:
        return f"{self.pool}-{self.ordinal}-0"

    @property
    def serves(self) -> bool:
        return super().serves and not self.loses_stage

    def seen(self) -> Pod:
        return replace(super().seen(), loses_stage=self.loses_stage)


class GroupWorld(FleetWorld):
    """Its API server serves LeaderWorkerSets if `lws`."""

    def __init__(self, random: Random, *, lws: bool, **more: Any) -> None:
        # Twice: for the later stages, and then for the first one.
        super().__init__(random, start_s=(2.5, 20.0), stages=STAGES, stagePods="Own", **more)
        self.has_leader_worker_sets = lws

    def groups(self) -> list[GroupNode]:
        return [pod for pod in self.pods if isinstance(pod, GroupNode)]

    def lose_stage(self, pool: str, index: int) -> None:
        """The pod of a later stage is evicted: it waits for the end of its instance."""
        found = [one for one in self.groups() if one.pool == pool and one.ready]
        if found:
            found[index % len(found)].loses_stage = True

    def evict(self, pool: str, index: int) -> None:
        """The pod of a first stage is evicted: it drains by itself."""
        found = [one for one in self.groups() if one.pool == pool and one.ready]
        if found:
            self._terminate(found[index % len(found)])

    # ---- the operator

    def _children(self, pool: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {k: v for k, v in self.live.items() if _label(v, POOL_LABEL) == pool}

    def _carry_out(self, thing: dict[str, Any], action: Action) -> None:
        if isinstance(action, Delete) and action.kind in _MAKERS:
            maker = self.live[action.kind, action.name]
            assert _label(maker, STAGE_LABEL) == FIRST, "later stages go with their owner"
            for node in self.groups():
                its = node.maker_uid == maker["metadata"]["uid"]
                if its and node.terminating_at_s is None:
                    self._check_removal(node)
        super()._carry_out(thing, action)

    def _check_pairing(self, pool: dict[str, Any], pod: Node) -> None:
        if not (isinstance(pod, GroupNode) and pod.loses_stage):
            super()._check_pairing(pool, pod)

    def _check_capacity(self, pod: Node) -> None:
        if not (isinstance(pod, GroupNode) and pod.loses_stage):
            super()._check_capacity(pod)

    # ---- the cluster

    def _pass_time(self) -> None:
        self._collect_garbage()
        for maker in [v for (kind, _), v in self.live.items() if kind in _MAKERS]:
            if _label(maker, STAGE_LABEL) == FIRST:
                self._make_first(maker)
        for node in self.groups():
            self._make_later(node)
            if self.now_s >= node.later_ready_at_s and node.ready_at_s == math.inf:
                node.ready_at_s = self.now_s + self.random.uniform(*self.start_s)
        super()._pass_time()

    def _collect_garbage(self) -> None:
        uids = {v["metadata"]["uid"] for v in self.live.values()} | {p.uid for p in self.pods}
        for key, thing in list(self.live.items()):
            owners = thing["metadata"].get("ownerReferences", [])
            if key[0] in _MAKERS and not any(owner["uid"] in uids for owner in owners):
                del self.live[key]
        for node in self.groups():
            if node.maker_uid not in uids and node.terminating_at_s is None:
                self._terminate(node)

    def _make_first(self, maker: dict[str, Any]) -> None:
        pool, _, ordinal = maker["metadata"]["name"].rpartition("-")
        if any((one.pool, one.ordinal) == (pool, int(ordinal)) for one in self.pods):
            return
        template = maker["spec"].get("template")
        template = template or maker["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = template["metadata"]["labels"]
        self._uids += 1
        self.pods.append(
            GroupNode(
                pool=pool,
                ordinal=int(ordinal),
                uid=f"p{self._uids}",
                template=labels[TEMPLATE_LABEL],
                revision=labels[REVISION_LABEL],
                ready_at_s=math.inf,
                unready_since_s=self.now_s,
                maker_uid=maker["metadata"]["uid"],
            )
        )

    def _make_later(self, node: GroupNode) -> None:
        """Makes the pods of the later stages from what is there for this very pod."""
        if node.later_template or node.terminating_at_s is not None:
            return
        group = f"{node.pool}-{node.ordinal}"
        if (made := self.live.get(("LeaderWorkerSet", group))) is not None:
            template = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        elif (made := self.live.get(("StatefulSet", node.name))) is not None:
            owners = [owner["uid"] for owner in made["metadata"]["ownerReferences"]]
            assert made["spec"]["replicas"] == STAGES - 1
            if owners != [node.uid]:
                return
            template = made["spec"]["template"]
        else:
            return
        node.later_template = template["metadata"]["labels"][TEMPLATE_LABEL]
        assert node.later_template == node.template, "a group has two templates"
        node.later_ready_at_s = self.now_s + self.random.uniform(*self.start_s)

    def _scale_out(self, owner: dict[str, Any]) -> None:
        """`_make_first` and `_make_later` do it."""

    def _scale_in(self, owner: dict[str, Any]) -> None:
        """Sizes of StatefulSets do not change."""


def _label(thing: dict[str, Any], name: str) -> str:
    return thing["metadata"].get("labels", {}).get(name, "")

    def happen(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("lose_stage" | "evict" as what, pool, index):
                getattr(self, what)(pool, index)
            case ("kind", lws):
                self.has_leader_worker_sets = lws  # and the operator starts again
        super().happen(event)
