"""A StatefulSet's pods as the operator sees them, and what keeps one from starting. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from millrace_operator.manifests.naming import REVISION_LABEL, TEMPLATE_LABEL
from millrace_operator.observed import Object, Pod
from millrace_operator.reconcile.conditions import by_type, seconds

#: What a container waits for while it starts as it should.
_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})

#: Long enough for what a kubelet says, short enough for a condition's message.
_LONGEST = 300


def pods_of(name: str, objects: Iterable[Object]) -> tuple[Pod, ...]:
    """The pods among `objects` that the StatefulSet `name` made, by ordinal.

    Copies for debugging and the like, which bear the same labels, are not among them.
    """
    found = []
    for obj in objects:
        meta = obj["metadata"]
        ordinal = re.fullmatch(re.escape(name) + r"-(0|[1-9]\d*)", meta["name"])
        if ordinal and _made_by(name, meta):
            found.append(_pod(obj, int(ordinal[1])))
    return tuple(sorted(found, key=lambda pod: pod.ordinal))


def finished(obj: Object) -> bool:
    """Whether all containers of the pod have ended for good: it uses nothing any more."""
    return obj.get("status", {}).get("phase") in ("Failed", "Succeeded")


def _made_by(name: str, meta: Mapping[str, Any]) -> bool:
    return any(
        owner.get("controller") and (owner["kind"], owner["name"]) == ("StatefulSet", name)
        for owner in meta.get("ownerReferences", [])
    )


def _pod(obj: Object, ordinal: int) -> Pod:
    meta, status = obj["metadata"], obj.get("status", {})
    labels = meta.get("labels", {})
    terminating = "deletionTimestamp" in meta
    told: Mapping[str, Any] = by_type(status).get("Ready", {})
    ready = told.get("status") == "True"
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ordinal=ordinal,
        template=labels.get(TEMPLATE_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        ready=ready and not terminating and not finished(obj),
        unready_since_s=seconds(told.get("lastTransitionTime") or meta["creationTimestamp"]),
        terminating=terminating,
        trouble="" if ready or terminating else next(_troubles(status), "")[:_LONGEST],
    )


def _troubles(status: Mapping[str, Any]) -> Iterator[str]:
    """What keeps the pod from starting, as `Reason: message`; the cause of the others first."""
    if status.get("phase") == "Failed":
        yield _line(status.get("reason") or "Failed", status.get("message", ""))
    for entry in status.get("conditions", []):
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            yield _line(entry.get("reason", "Unschedulable"), entry.get("message", ""))
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    for container in containers:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason", "") not in _NORMAL:
            yield _line(waiting["reason"], _ending(container) or waiting.get("message", ""))


def _ending(container: Mapping[str, Any]) -> str:
    """How the container ended last: the reason of its next start's delay."""
    ended = container.get("lastState", {}).get("terminated")
    if not ended:
        return ""
    reason = ended.get("reason", "Error")
    message = ended.get("message", "").strip()
    return f"exit code {ended.get('exitCode', '?')} ({reason}) {message}".strip()


def _line(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason
