"""Every profile of the chart: lint, the API's schemas, the CRDs' schemas, the golden snapshot."""

from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from support.chart import (
    CHART,
    GOLDEN,
    NEWEST,
    PROFILES,
    README,
    Object,
    objects,
    profile,
    readme_with,
    snapshot,
    values_of,
    values_table,
)

#: A group of Kubernetes' own domain that API servers lack.
GATEWAY = "gateway.networking.k8s.io"

CRDS = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]


def closed(schema: Any) -> Any:
    """Makes unknown fields errors in the schema: the API server would drop them silently."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: closed(value) for name, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    return kept


def custom_schema(manifest: Object) -> Object:
    (crd,) = [crd for crd in CRDS if crd["spec"]["names"]["kind"] == manifest["kind"]]
    (version,) = crd["spec"]["versions"]
    schema: Object = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def test_the_profiles_are_those_that_the_documentation_names() -> None:
    assert set(PROFILES) == {
        *("minimal", "cpu", "gpu", "rdma", "external-redis", "mixed", "stages", "everything")
    }


@pytest.mark.parametrize("name", PROFILES)
def test_helm_finds_nothing_to_complain_of(name: str) -> None:
    report = helm.lint(CHART, values_of(name), strict=True, namespace="llm", kube_version="v1.36.0")
    worth_a_word = [m for m in report["messages"] if "icon" not in m["error"]]
    assert not worth_a_word and not report["errors"]


def of_kubernetes(manifest: Object) -> bool:
    """Returns whether an API server knows the kind without a CRD."""
    group = manifest["apiVersion"].rpartition("/")[0]
    return group in ("", "apps", "policy") or (group.endswith(".k8s.io") and group != GATEWAY)


@pytest.mark.parametrize("name", PROFILES)
def test_the_api_server_would_take_every_object(name: str) -> None:
    for manifest in profile(name):
        if manifest["apiVersion"].startswith("millrace.dev/"):
            Draft202012Validator(custom_schema(manifest)).validate(manifest)
        elif of_kubernetes(manifest):
            kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_the_oldest_api_server_knows_all_that_is_used() -> None:
    with helm.Chart.load(CHART) as chart:
        oldest = chart.metadata["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    for manifest in filter(of_kubernetes, profile("everything")):
        kubernetes_validate.validate(manifest, oldest, strict=True)


@pytest.mark.parametrize("name", PROFILES)
def test_pod_templates_of_values_are_pod_templates(name: str) -> None:
    """Checks templates, where the CRD takes any object: a typing error would show only at the
    pods.
    """
    services = [o for o in profile(name) if o["kind"] == "ModelService"]
    for part in services[0]["spec"].values() if services else ():
        if not isinstance(part, dict) or "template" not in part:
            continue
        template = part["template"]
        for container in template["spec"].get("containers", []):
            assert container["name"] == "millrace"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
        pod["spec"] = {"containers": [{"name": "millrace"}], **pod["spec"]}
        kubernetes_validate.validate(pod, NEWEST, strict=True)


@pytest.mark.parametrize("name", PROFILES)
def test_names_are_told_apart_and_stay_in_the_release(name: str) -> None:
    found = profile(name)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in found]
    assert len(keys) == len(set(keys))
    prefix = values_of(name).get("nameOverride", "millrace")
    assert all(key[2].startswith(prefix) for key in keys)


def test_releases_of_one_name_live_in_several_namespaces() -> None:
    """What is cluster-wide has the namespace in its name. A PriorityClass once had not."""
    values = {**values_of("minimal"), "priorityClass": {"create": True}}
    there, here = (
        {(o["kind"], o["metadata"]["name"]) for o in found if "namespace" not in o["metadata"]}
        for found in (objects(values, namespace=namespace) for namespace in ("a", "b"))
    )
    assert {kind for kind, _ in here} == {"ClusterRole", "ClusterRoleBinding", "PriorityClass"}
    assert not there & here
    (service,) = [o for o in objects(values, namespace="a") if o["kind"] == "ModelService"]
    pods = [service["spec"][part]["template"]["spec"] for part in ("decode", "gateway")]
    assert {pod["priorityClassName"] for pod in pods} == {"millrace-a"}


@pytest.mark.parametrize("name", PROFILES)
def test_images_have_a_version_and_no_registry_of_ours(name: str) -> None:
    given = str(values_of(name))
    for manifest in profile(name):
        pod = (
            manifest["spec"].get("template", manifest).get("spec", {}) if "spec" in manifest else {}
        )
        for container in pod.get("containers", []) if manifest["kind"] != "ModelService" else []:
            image = container["image"]
            assert ":" in image.rpartition("/")[2] and not image.endswith(":latest")
            assert "/" not in image or image.rpartition("/")[0] in given


def test_the_minimal_profile_renders_as_it_did() -> None:
    """After a wanted change of the chart, run python tests/support/chart.py and read the
    difference.
    """
    assert snapshot() == GOLDEN.read_text()


def test_the_readme_lists_every_value() -> None:
    """After a change of values, run python tests/support/chart.py."""
    assert README.read_text() == readme_with(values_table())
    assert "| `image.registry` |" in values_table()


@pytest.mark.parametrize("name", ["minimal", "cpu", "mixed"])
def test_profiles_to_start_from_need_no_secret_and_no_volume(name: str) -> None:
    """Their commands in README.md and docs/guides/kubernetes.md work as printed."""
    text = str(values_of(name))
    assert "secret" not in text.lower() and "claimName" not in text
    assert "image" not in values_of(name) and "weights" not in values_of(name)


def test_no_file_of_the_chart_names_a_registry() -> None:
    for path in CHART.rglob("*"):
        if path.is_file() and "ci" not in path.parts:
            text = path.read_text()
            assert not any(host in text for host in ("docker.io", "ghcr.io", "quay.io", "nvcr.io"))
