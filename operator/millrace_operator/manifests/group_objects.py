"""Makes the objects of a group: the pods of an instance whose stages have pods of their own.

LeaderWorkerSets (https://github.com/kubernetes-sigs/lws) give pods these names. The operator gives
its own StatefulSets the same names:

- NAME-0: the pod of the first stage, from a StatefulSet or a LeaderWorkerSet NAME;
- NAME-0-1, NAME-0-2, ...: the pods of the later stages, from a StatefulSet NAME-0.

The pod of the first stage owns the StatefulSet of the later stages: these pods end after it, and
its successor gets new ones, also while no operator runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_operator.manifests import naming
from millrace_operator.manifests.instances import Group, Groups
from millrace_operator.manifests.objects import Manifest, pool_metadata, stateful_set_spec
from millrace_operator.observed import Pod, Pool

STATEFUL_SET, LEADER_WORKER_SET = "StatefulSet", "LeaderWorkerSet"

#: Annotations that a user's pod template gives to LeaderWorkerSets, such as exclusive topology.
_ANNOTATIONS = "leaderworkerset.sigs.k8s.io/"


def group_object(groups: Groups, ordinal: int, kind: str) -> Manifest:
    """Returns the object of this kind that makes the group's first pod."""
    if kind == LEADER_WORKER_SET:
        name = f"{groups.pool.name}-{ordinal}"
        # Its controller makes a headless Service of the group's name, and names pods by it.
        return _leader_worker_set(groups.pool, groups.group(ordinal, name))
    group = groups.group(ordinal)
    spec = stateful_set_spec(groups.pool, group.first, 1, _selector(group, naming.FIRST))
    return _stateful_set(_metadata(groups.pool, group, group.name, naming.FIRST), spec)


def later_stages(groups: Groups, first: Pod) -> Manifest:
    """Returns the StatefulSet of the later stages, for the pod of the first stage."""
    group = groups.group(first.ordinal)
    selector = _selector(group, naming.LATER)
    spec = stateful_set_spec(groups.pool, group.later, group.later_stages, selector)
    metadata = _metadata(groups.pool, group, first.name, naming.LATER)
    metadata["ownerReferences"] = [naming.pod_owner(first.name, first.uid)]
    return _stateful_set(metadata, {**spec, "ordinals": {"start": 1}})


def _leader_worker_set(pool: Pool, group: Group) -> Manifest:
    metadata = _metadata(pool, group, group.name, naming.FIRST)
    annotations = group.first["metadata"]["annotations"]
    own = {k: v for k, v in annotations.items() if k.startswith(_ANNOTATIONS)}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": LEADER_WORKER_SET,
        "metadata": {**metadata, "annotations": own},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": 1 + group.later_stages,
                "leaderTemplate": group.first,
                "workerTemplate": group.later,
                # A stage that dies ends its instance, and containers that start again find one
                # another: no pod need be made again.
                "restartPolicy": "None",
            },
        },
    }


def _stateful_set(metadata: Manifest, spec: Mapping[str, Any]) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": STATEFUL_SET, "metadata": metadata, "spec": dict(spec)}


def _metadata(pool: Pool, group: Group, name: str, stage: str) -> Manifest:
    metadata = pool_metadata(pool)
    template = group.first["metadata"]["labels"][naming.TEMPLATE_LABEL]
    own = {**naming.group_selector(group.name, stage), naming.TEMPLATE_LABEL: template}
    return {**metadata, "name": name, "labels": {**metadata["labels"], **own}}


def _selector(group: Group, stage: str) -> dict[str, str]:
    return naming.group_selector(group.name, stage)
