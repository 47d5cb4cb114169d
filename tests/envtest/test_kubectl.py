"""The commands that users type."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from support.control_plane import ControlPlane
from support.custom_objects import VERSION, pool, service
from support.kube_api import Api

Kubectl = Callable[..., str]


@pytest.fixture
def kubectl(plane: ControlPlane, namespace: str) -> Kubectl:
    """Runs kubectl in the namespace and returns its output; fails when kubectl fails."""
    binary = plane.kubectl()
    if binary is None:
        pytest.skip("needs kubectl, beside kube-apiserver or on PATH")
    cache = plane.folder / "kubectl-cache"

    def run(*arguments: str, stdin: str = "") -> str:
        common = [f"--kubeconfig={plane.kubeconfig}", f"--cache-dir={cache}", f"-n={namespace}"]
        done = subprocess.run(
            [str(binary), *common, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_get_millrace_lists_all_kinds(api: Api, namespace: str, kubectl: Kubectl) -> None:
    api.apply(service(namespace=namespace))
    api.apply(pool("PrefillGroup", "chat-prefill", namespace))
    lines = kubectl("get", "millrace").splitlines()
    assert lines[0].split() == [
        "NAME",
        "MODEL",
        "PREFILL",
        "DECODE",
        "KVP",
        "PHASE",
        "AVAILABLE",
        "AGE",
    ]
    assert any(line.startswith("modelservice.millrace.dev/chat ") for line in lines)
    assert any(line.startswith("prefillgroup.millrace.dev/chat-prefill ") for line in lines)


def test_scale_sets_the_replicas(api: Api, namespace: str, kubectl: Kubectl) -> None:
    manifest = pool("PrefillGroup", "x", namespace, autoscaling={"mode": "External"})
    api.apply(manifest)
    assert "scaled" in kubectl("scale", "pg/x", "--replicas=4")
    found = api.get(VERSION, "PrefillGroup", namespace, "x")
    assert found is not None and found["spec"]["replicas"] == 4


def test_wait_for_available(api: Api, namespace: str, kubectl: Kubectl) -> None:
    manifest = service(namespace=namespace)
    api.apply(manifest)
    served = {
        "type": "Available",
        "status": "True",
        "reason": "Served",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    api.merge(manifest, {"status": {"conditions": [served]}}, "status")
    assert "condition met" in kubectl(
        "wait", "--for=condition=Available", "ms/chat", "--timeout=9s"
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ms.spec.model.uri", "hub"),
        ("pg.spec.autoscaling.scaleToZero.idleSeconds", "sleep"),
        ("dp.spec.drain.onTimeout", "Migrate"),
        ("kvp.spec.growthLeadSeconds", "start"),
        ("pg.status.recommendationReason", "Why"),
    ],
)
def test_explain_tells_of_a_field(path: str, says: str, kubectl: Kubectl) -> None:
    printed = kubectl("explain", path)
    assert "DESCRIPTION:" in printed and "<empty>" not in printed and says in printed


def test_patch_and_delete_by_short_name(api: Api, namespace: str, kubectl: Kubectl) -> None:
    api.apply(pool("DecodePool", "y", namespace))
    kubectl("patch", "dp", "y", "--type=merge", "-p", '{"spec":{"drain":{"timeoutSeconds":5}}}')
    assert kubectl("get", "dp", "y", "-o=jsonpath={.spec.drain.timeoutSeconds}") == "5"
    kubectl("delete", "dp/y", "--timeout=9s")
    assert api.get(VERSION, "DecodePool", namespace, "y") is None
