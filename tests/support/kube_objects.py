"""Kubernetes objects as plain dictionaries: patches, selection, pods of a StatefulSet."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kmock import Request

Object = dict[str, Any]


def pod_of(name: str, owner: Object, *, ready: bool) -> Object:
    template = copy.deepcopy(owner["spec"]["template"])
    reference = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    meta = {"name": name, "namespace": owner["metadata"]["namespace"]}
    meta |= {"labels": template["metadata"]["labels"], "ownerReferences": [reference]}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": template["spec"],
        "status": {"phase": "Running" if ready else "Pending", "conditions": conditions},
    }


def leaders_of(leader_worker_set: Object) -> Object:
    """Returns the StatefulSet of a LeaderWorkerSet's leaders, as its controller makes it."""
    meta, spec = leader_worker_set["metadata"], leader_worker_set["spec"]
    template = spec["leaderWorkerTemplate"]["leaderTemplate"]
    return _set_for(leader_worker_set, meta["name"], template, spec["replicas"], 0)


def workers_of(leader: Object, store: Mapping[tuple[str, str, str], Object]) -> Object | None:
    """Returns the StatefulSet of a leader's workers; None for other pods, or if it is there."""
    meta = leader["metadata"]
    found = store.get(("LeaderWorkerSet", meta["namespace"], meta["name"].rpartition("-")[0]))
    if found is None or ("StatefulSet", meta["namespace"], meta["name"]) in store:
        return None
    parts = found["spec"]["leaderWorkerTemplate"]
    return _set_for(leader, meta["name"], parts["workerTemplate"], parts["size"] - 1, 1)


def _set_for(owner: Object, name: str, template: Object, replicas: int, start: int) -> Object:
    reference = {k: owner[k] for k in ("apiVersion", "kind")}
    reference |= {k: owner["metadata"][k] for k in ("name", "uid")}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "uid": f"{owner['metadata']['uid']}-{name}",
            "creationTimestamp": owner["metadata"]["creationTimestamp"],
            "ownerReferences": [{**reference, "controller": True}],
        },
        "spec": {"replicas": replicas, "ordinals": {"start": start}, "template": template},
    }


def bare(obj: Object) -> Object:
    """Returns the object without the fields that every write changes."""
    meta = {k: v for k, v in obj["metadata"].items() if k not in ("resourceVersion", "generation")}
    return {**obj, "metadata": meta}


def is_chosen(request: Request, obj: Object) -> bool:
    """Returns whether the request's namespace and label selector match the object."""
    meta = obj["metadata"]
    if request.namespace and meta.get("namespace") != request.namespace:
        return False
    labels = meta.get("labels", {})
    for term in filter(None, request.params.get("labelSelector", "").split(",")):
        name, equals, value = term.partition("=")
        if equals:
            held = labels.get(name) == value
        else:
            held = (name.lstrip("!") in labels) is not name.startswith("!")
        if not held:
            return False
    return True


def merge(into: Object, patch: Object) -> None:
    """Applies a JSON merge patch (RFC 7396)."""
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = value


def drop_unapplied(obj: Object, before: Object, now: Object) -> None:
    """Removes the fields that a manager applied before and does not apply now."""
    for name, value in before.items():
        if isinstance(value, dict) and isinstance(obj.get(name), dict):
            drop_unapplied(obj[name], value, now.get(name) or {})
            if name not in now and not obj[name]:
                del obj[name]
        elif name not in now and name not in ("apiVersion", "kind", "name", "namespace"):
            obj.pop(name, None)
