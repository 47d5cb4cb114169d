"""The owner of a pool's `spec.replicas` is an HPA or a person, never the tool that applies the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from support.custom_objects import VERSION, pool
from support.kube_api import MERGE, Api, Object, Refused, condition, eventually


@pytest.fixture
def external(api: Api, namespace: str) -> Object:
    """A pool that others scale, applied by GitOps without `replicas`."""
    manifest = pool("PrefillGroup", "x", namespace, autoscaling={"mode": "External"})
    api.apply(manifest, manager="gitops")
    status = {"replicas": 1, "selector": "millrace.dev/pool=x"}
    api.merge(manifest, {"status": status}, "status")
    return manifest


def replicas(api: Api, manifest: Object) -> int:
    meta = manifest["metadata"]
    found = api.get(VERSION, manifest["kind"], meta["namespace"], meta["name"])
    assert found is not None
    return int(found["spec"]["replicas"])


def scale(api: Api, manifest: Object, wanted: int, manager: str) -> None:
    meta = manifest["metadata"]
    path = api.path(VERSION, manifest["kind"], meta["namespace"], meta["name"], "scale")
    body = {"spec": {"replicas": wanted}}
    api.call("PATCH", path, body, query={"fieldManager": manager}, content_type=MERGE)


def owners(obj: Mapping[str, Any]) -> list[str]:
    """Returns the managers of spec.replicas."""
    return [
        entry["manager"]
        for entry in obj["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    ]


def test_applying_the_rest_again_leaves_a_scaled_pool_alone(api: Api, external: Object) -> None:
    scale(api, external, 5, "somebody")
    for manager, force in (("gitops", False), ("millrace-operator", True)):
        after = api.apply(external, manager=manager, force=force)
        # No manager ever applied it, so no apply without it removes it.
        assert after["spec"]["replicas"] == 5 and owners(after) == []


def test_whoever_applies_replicas_over_a_scaler_hears_of_the_conflict(
    api: Api, external: Object
) -> None:
    fixed = {**external, "spec": {**external["spec"], "replicas": 2}}
    assert owners(api.apply(fixed, manager="gitops")) == ["gitops"]
    scale(api, external, 5, "keda")
    with pytest.raises(Refused, match='conflict with "keda"') as refused:
        api.apply(fixed, manager="gitops")
    assert refused.value.status == 409 and replicas(api, external) == 5


def test_an_hpa_reads_and_sets_the_scale(
    controllers: None, api: Api, namespace: str, external: Object
) -> None:
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": VERSION, "kind": "PrefillGroup", "name": "x"},
            "minReplicas": 3,
            "maxReplicas": 6,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "backlog_seconds"},
                        "target": {"type": "AverageValue", "averageValue": "4"},
                    },
                }
            ],
        },
    }
    api.apply(hpa)
    # No server has the metric: without it the HPA keeps its minimum.
    eventually(lambda: replicas(api, external) == 3, what="replicas set by the HPA")

    def able() -> str:
        found = api.get(hpa["apiVersion"], hpa["kind"], namespace, "x")
        return condition(found, "AbleToScale")

    eventually(lambda: able() == "True", what="AbleToScale")
    assert api.apply(external, manager="gitops")["spec"]["replicas"] == 3
