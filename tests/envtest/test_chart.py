"""The chart's releases by Helm's own engine: install, upgrade, rollback, uninstall."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from support.control_plane import ControlPlane
from support.custom_objects import CHART, VERSION, crds, merged
from support.kube_api import Api, Object, condition, eventually
from support.operator_process import OperatorProcess
from support.releases import PENDING, helm_of, objects_of
from support.stand_in_nodes import StandInNodes, pod_template

MINIMAL = yaml.safe_load((CHART / "ci" / "minimal-values.yaml").read_text())

#: Kinds of other projects that Helm must find: group, version, kind, plural.
OTHERS = [
    ("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    ("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"),
    ("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
    ("cert-manager.io", "v1", "Certificate", "certificates"),
    ("cert-manager.io", "v1", "Issuer", "issuers"),
]


def values(**more: Any) -> dict[str, Any]:
    return dict(merged(merged(MINIMAL, dict(PENDING)), more))


@pytest.fixture
def release(plane: ControlPlane, namespace: str) -> Iterator[tuple[helm.Config, helm.Chart]]:
    """Runs Helm in the test's namespace; the release `llm` is removed afterwards."""
    with helm_of(plane, namespace) as (config, chart):
        yield config, chart
        config.uninstall("llm", ignore_not_found=True)


def model_service(api: Api, namespace: str) -> Object:
    found = api.get(VERSION, "ModelService", namespace, "llm")
    assert found is not None
    return found


def password(api: Api, namespace: str) -> str:
    found = api.get("v1", "Secret", namespace, "llm-redis")
    assert found is not None
    return b64decode(found["data"]["password"]).decode()


def test_a_release_lives_and_leaves_nothing_but_the_crds(
    plane: ControlPlane, api: Api, namespace: str, release: tuple[helm.Config, helm.Chart]
) -> None:
    config, chart = release
    installed = config.install(chart, "llm", values())
    assert installed["status"] == "deployed" and "kubectl" in installed["notes"]
    made = model_service(api, namespace)
    assert made["spec"]["gateway"]["replicas"] == 2
    first = password(api, namespace)
    assert len(first) >= 32

    upgraded = config.upgrade(
        chart, "llm", values(gateway={"replicas": 3}, slo={"ttftSeconds": "2"})
    )
    assert upgraded["revision"] == 2
    changed = model_service(api, namespace)
    assert changed["spec"]["gateway"]["replicas"] == 3
    assert changed["spec"]["slo"]["ttftSeconds"] == "2"
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    assert password(api, namespace) == first

    config.rollback("llm", version=1)
    back = model_service(api, namespace)
    assert back["spec"] == made["spec"] and password(api, namespace) == first
    assert [entry["status"] for entry in config.history("llm")] == [
        "superseded",
        "superseded",
        "deployed",
    ]

    config.uninstall("llm")
    if plane.controllers:  # they remove objects that Helm never made: pods, the volume's claim
        eventually(lambda: not objects_of(plane, "llm", namespace), 60, what="left over")
    left = {kind for kind, _ in objects_of(plane, "llm", namespace)}
    assert left <= {"Pod", "ReplicaSet", "ControllerRevision", "PersistentVolumeClaim"}
    for crd in crds():
        assert api.get(crd["apiVersion"], crd["kind"], "", crd["metadata"]["name"]) is not None


def test_uninstalling_takes_a_running_service_along(
    controllers: None,
    plane: ControlPlane,
    namespace: str,
    nodes: StandInNodes,
    release: tuple[helm.Config, helm.Chart],
) -> None:
    """The operator loses its rights at any point of the uninstall: nothing waits for it."""
    config, chart = release
    parts = ("gateway", "scheduler", "prefill", "decode")
    config.install(chart, "llm", values(**{part: {"template": pod_template()} for part in parts}))
    operator = OperatorProcess(plane, namespace)
    operator.start()
    try:
        eventually(
            lambda: condition(model_service(plane.api, namespace), "Available") == "True",
            what=f"Available; {operator.log}:",
        )
        config.uninstall("llm")
        eventually(lambda: not objects_of(plane, "llm", namespace), 60, what="left over")
    finally:
        operator.kill()


def test_an_upgrade_keeps_what_others_own(
    api: Api, namespace: str, release: tuple[helm.Config, helm.Chart]
) -> None:
    """Helm applies server-side: a field that the chart leaves out keeps its owner."""
    config, chart = release
    config.install(chart, "llm", values())
    service = model_service(api, namespace)
    api.merge(service, {"spec": {"paused": True}}, manager="somebody")
    config.upgrade(chart, "llm", values(gateway={"replicas": 3}))
    spec = model_service(api, namespace)["spec"]
    assert spec["gateway"]["replicas"] == 3 and spec["paused"]


def test_values_that_the_crds_refuse_leave_no_release(
    plane: ControlPlane, namespace: str, release: tuple[helm.Config, helm.Chart]
) -> None:
    config, chart = release
    unbalanced = {"autoscaling": {"scaleToZero": {"enabled": True}}}
    with pytest.raises(helm.HelmError, match="both scale to zero"):
        config.install(chart, "llm", values(prefill=unbalanced), rollback_on_failure=True)
    assert config.list(all_states=True) == []
    kept = {kind for kind, _ in objects_of(plane, "llm", namespace)}
    assert kept <= {"Pod", "ReplicaSet", "ControllerRevision", "PersistentVolumeClaim"}


@pytest.fixture(scope="module")
def other_kinds(api: Api) -> Iterator[None]:
    """Registers other projects' kinds, by name only, without their schemas."""
    made = []
    for group, version, kind, plural in OTHERS:
        name = f"{plural}.{group}"
        if api.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name) is None:
            made.append(api.apply(_open_crd(group, version, kind, plural)))
    eventually(lambda: {(f"{g}/{v}", k) for g, v, k, _ in OTHERS} <= api.resources().keys())
    yield
    for crd in made:
        api.delete(crd)


def _open_crd(group: str, version: str, kind: str, plural: str) -> Object:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    one = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [one]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # The group is protected: tests need no approval of upstream's own kinds.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
        },
        "spec": spec,
    }


@pytest.mark.parametrize(
    "profile", sorted((CHART / "ci").glob("*-values.yaml")), ids=lambda path: path.stem
)
def test_the_server_accepts_every_object_of_a_profile(
    api: Api,
    profile: Path,
    namespace: str,
    release: tuple[helm.Config, helm.Chart],
    other_kinds: None,
) -> None:
    config, chart = release
    given = yaml.safe_load(profile.read_text())
    if given.get("operator", {}).get("watchNamespaces"):
        given["operator"]["watchNamespaces"] = [namespace]
    done = config.install(chart, "llm", given, dry_run="server")
    manifests = [obj for obj in yaml.safe_load_all(done["manifest"]) if obj]
    assert any(obj["kind"] == "Deployment" for obj in manifests)
    for obj in manifests:
        api.apply(obj, dry_run=True)
