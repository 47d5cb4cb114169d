"""Reads a pool's pods, and why a pod does not start. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace_operator.manifests.naming import COMPONENT_LABEL, REVISION_LABEL, TEMPLATE_LABEL
from millrace_operator.observed import Ending, Object, Pod
from millrace_operator.reconcile.conditions import by_type, seconds

#: Reasons for which a container waits during a normal start.
_NORMAL = frozenset({"", "ContainerCreating", "PodInitializing"})

#: The longest message: enough for a kubelet's texts, short enough for a condition.
_LONGEST = 300


def pods_of(name: str, objects: Iterable[Object]) -> tuple[Pod, ...]:
    """Returns the pods among `objects` that the StatefulSet `name` made, by ordinal.

    Copies of pods, such as for debugging, have the same labels but do not count.
    """
    found = []
    for obj in objects:
        meta = obj["metadata"]
        ordinal = re.fullmatch(re.escape(name) + r"-(0|[1-9]\d*)", meta["name"])
        if ordinal and _made_by(name, meta):
            found.append(_pod(obj, int(ordinal[1])))
    return tuple(sorted(found, key=lambda pod: pod.ordinal))


def groups_of(name: str, objects: Iterable[Object]) -> tuple[Pod, ...]:
    """Returns the pods of first stages among `objects`, for the pool `name` whose stages have pods
    of their own, by ordinal. Each has the state of its later stages' pods, too.
    """
    firsts: list[tuple[Pod, Object]] = []
    laters: dict[str, list[Object]] = {}
    for obj in objects:
        meta = obj["metadata"]
        found = re.fullmatch(rf"({re.escape(name)}-(0|[1-9]\d*))-0(-[1-9]\d*)?", meta["name"])
        if not found:
            continue
        group, ordinal, later = found.groups()
        if later and _made_by(f"{group}-0", meta):
            laters.setdefault(f"{group}-0", []).append(obj)
        elif not later and _made_by(group, meta):
            firsts.append((_pod(obj, int(ordinal)), obj))
    pods = [_with_later(pod, obj, laters.get(pod.name, [])) for pod, obj in firsts]
    return tuple(sorted(pods, key=lambda pod: pod.ordinal))


def _with_later(pod: Pod, first: Object, laters: Sequence[Object]) -> Pod:
    """`laters`: pods of later stages; older ones than the first stage's pod had another before."""
    since = first["metadata"]["creationTimestamp"]
    own = [obj for obj in laters if obj["metadata"]["creationTimestamp"] >= since]
    troubles = [
        f"{one.name}: {one.trouble}" for one in (_pod(obj, 0) for obj in own) if one.trouble
    ]
    return replace(
        pod,
        trouble=pod.trouble or (troubles[0] if troubles else "")[:_LONGEST],
        endings=pod.endings + _endings(laters),
        loses_stage=any("deletionTimestamp" in obj["metadata"] for obj in own),
    )


def all_available(deployment: Object) -> bool:
    """Returns whether every pod of a Deployment is made, new and available."""
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status", {})
    counts = [status.get(f"{name}Replicas", 0) for name in ("updated", "available")]
    return counts == [wanted, wanted] and status.get("replicas", 0) == wanted


def troubles_of(objects: Iterable[Object]) -> dict[str, str]:
    """Returns why pods of Deployments do not start: the first pod's trouble, by component."""
    found: dict[str, str] = {}
    for obj in objects:
        meta, status = obj["metadata"], obj.get("status", {})
        if "deletionTimestamp" in meta or finished(obj) or _is_ready(status):
            continue
        if trouble := next(_troubles(status), ""):
            component = meta.get("labels", {}).get(COMPONENT_LABEL, "")
            found.setdefault(component, f"{meta['name']}: {trouble[:_LONGEST]}")
    return found


def finished(obj: Object) -> bool:
    """Returns whether all containers of the pod have ended for good: it uses no resources any
    more.
    """
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
    condition: Mapping[str, Any] = by_type(status).get("Ready", {})
    ready = _is_ready(status)
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ordinal=ordinal,
        template=labels.get(TEMPLATE_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        ready=ready and not terminating and not finished(obj),
        unready_since=condition.get("lastTransitionTime") or meta["creationTimestamp"],
        terminating=terminating,
        endings=_endings([obj]),
        trouble="" if ready or terminating else next(_troubles(status), "")[:_LONGEST],
    )


def _endings(objects: Iterable[Object]) -> tuple[Ending, ...]:
    return tuple(
        Ending(
            name=obj["metadata"]["name"],
            node=obj.get("spec", {}).get("nodeName", ""),
            by_s=seconds(obj["metadata"]["deletionTimestamp"]),  # with the grace period
            grace_s=float(obj["metadata"].get("deletionGracePeriodSeconds") or 0),
        )
        for obj in objects
        if "deletionTimestamp" in obj["metadata"]
    )


def _is_ready(status: Mapping[str, Any]) -> bool:
    return bool(by_type(status).get("Ready", {}).get("status") == "True")


def _troubles(status: Mapping[str, Any]) -> Iterator[str]:
    """Yields why the pod does not start, as `Reason: message`; root causes first."""
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
    """Returns how the container ended last: the reason for the delay of its next start.

    Of a log, which stands in the message of a failed container, the last line says why.
    """
    ended = container.get("lastState", {}).get("terminated")
    if not ended:
        return ""
    reason = ended.get("reason", "Error")
    message = ended.get("message", "").strip().rpartition("\n")[2]
    return f"exit code {ended.get('exitCode', '?')} ({reason}) {message}".strip()


def _line(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason
