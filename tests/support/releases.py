"""Helm releases of the chart on an API server, by Helm's own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import helm_python as helm

from support.control_plane import ControlPlane
from support.custom_objects import CHART
from support.kube_api import Object

#: No node has it: what the chart runs itself stays Pending, on a cluster with real nodes too.
NOWHERE = {"kubernetes.io/hostname": "nowhere"}

#: Merged over a test's own values.
PENDING: Mapping[str, Any] = {
    "operator": {"nodeSelector": NOWHERE},
    "redis": {"nodeSelector": NOWHERE},
}

#: No model and no Redis: what is left is the operator.
OPERATOR_ONLY: Mapping[str, Any] = {
    "operator": {"nodeSelector": NOWHERE},
    "redis": {"enabled": False},
    "externalRedis": {"url": "redis://redis.test:6379/0"},
}


@contextmanager
def helm_of(plane: ControlPlane, namespace: str) -> Iterator[tuple[helm.Config, helm.Chart]]:
    """Helm in a namespace, and the chart of this repository."""
    with (
        helm.Config(kubeconfig_path=plane.kubeconfig, namespace=namespace) as config,
        helm.Chart.load(CHART) as chart,
    ):
        yield config, chart


def objects_of(plane: ControlPlane, release: str, namespace: str) -> set[tuple[str, str]]:
    """(kind, name) of all that stands with a release: its own objects and what controllers made.

    Also what is cluster-wide. Endpoints and their slices follow their Service by themselves.
    """
    found = set()
    for (api_version, kind), resource in plane.api.resources().items():
        if "list" not in resource.verbs or kind in ("Event", "Endpoints", "EndpointSlice"):
            continue
        where = namespace if resource.namespaced else ""
        for obj in plane.api.list(api_version, kind, where):
            if _belongs(obj, release, namespace):
                found.add((kind, obj["metadata"]["name"]))
    return found


def _belongs(obj: Object, release: str, namespace: str) -> bool:
    meta = obj["metadata"]
    labels, annotations = meta.get("labels", {}), meta.get("annotations", {})
    if annotations.get("meta.helm.sh/release-name") == release:
        return bool(annotations["meta.helm.sh/release-namespace"] == namespace)
    instance = labels.get("app.kubernetes.io/instance") == release
    return instance and labels.get("app.kubernetes.io/name") == "millrace"
