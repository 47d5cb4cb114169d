"""Names, labels and ports of the objects that the operator makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_operator.manifests.config_file import digest
from millrace_operator.observed import Resource
from millrace_operator.schema import API_VERSION
from millrace_operator.schema.record import Record

MANAGER = "millrace-operator"

SERVICE_LABEL = "millrace.dev/service"
POOL_LABEL = "millrace.dev/pool"
TEMPLATE_LABEL = "millrace.dev/template"  # the template that a pod was made from
REVISION_LABEL = "millrace.dev/revision"  # the model's revision that the pod serves
COMPONENT_LABEL = "app.kubernetes.io/component"
GROUP_LABEL = "millrace.dev/group"  # the instance, if its stages have pods of their own
STAGE_LABEL = "millrace.dev/stage"  # which of its stages the pod has
FIRST, LATER = "first", "later"

#: Hash of the manifest that was applied last: only objects with another hash are applied again.
APPLIED = "millrace.dev/applied"
CONFIG = "millrace.dev/config"  # hash of the settings that a pod has read
INITIAL = "millrace.dev/initial-replicas"  # of a pool that a ModelService makes

SCHEDULER_PORT = 7070
WORKER_PORT = 7071
GATEWAY_PORT = 8080


def part_name(service: str, component: str) -> str:
    """Returns the name of a ModelService's objects of a component: config, scheduler or proxy."""
    return f"{service}-{component}"


def labels(service: str, component: str) -> dict[str, str]:
    """Returns the labels of every object of one component."""
    return {
        "app.kubernetes.io/name": "millrace",
        COMPONENT_LABEL: component,
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/part-of": "millrace",
        "app.kubernetes.io/managed-by": MANAGER,
        SERVICE_LABEL: service,
    }


def component_selector(service: str, component: str) -> dict[str, str]:
    return {SERVICE_LABEL: service, COMPONENT_LABEL: component}


def group_selector(group: str, stage: str) -> dict[str, str]:
    """Returns the labels of a group's pods that have its first stage, or a later one."""
    return {GROUP_LABEL: group, STAGE_LABEL: stage}


def owner(of: Resource[Record]) -> dict[str, Any]:
    """Returns the ownerReference by which a child is deleted with its owner."""
    return {
        "apiVersion": API_VERSION,
        "kind": of.kind,
        "name": of.name,
        "uid": of.metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def pod_owner(name: str, uid: str) -> dict[str, Any]:
    """Returns the ownerReference by which a child is deleted once a pod is gone."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest with its own hash in the annotation `APPLIED`."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
