"""Kubernetes objects as plain dictionaries: patches, selection, pods of a StatefulSet."""

from __future__ import annotations

import copy
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
