"""One control plane for all of these tests, with one namespace per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import yaml

from support.control_plane import ControlPlane, Unavailable, control_plane
from support.custom_objects import crds
from support.kube_api import Api, Object, condition, eventually
from support.operator_process import OperatorProcess
from support.operator_world import World
from support.releases import OPERATOR_ONLY, PENDING, helm_of
from support.scheduler_peers import quick, scheduler
from support.stand_in_nodes import StandInNodes, remove_node


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with the chart's CRDs."""
    folder = tmp_path_factory.mktemp("control-plane")
    try:
        with control_plane(folder, _install_crds) as running:
            yield running
            # Without its Node, a control plane that stays would delete the pods bound to it.
            remove_node(running.api)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Api:
    return plane.api


@pytest.fixture
def controllers(plane: ControlPlane) -> None:
    """A control plane for tests of Kubernetes' own controllers."""
    if not plane.controllers:
        pytest.skip("needs kube-controller-manager beside kube-apiserver")


@pytest.fixture
def audit(plane: ControlPlane) -> None:
    """A control plane for tests that count calls."""
    if plane.audit is None:
        pytest.skip("needs the audit log of an API server of its own")


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """A namespace that admits only pods of Pod Security's level `restricted`."""
    made = make_namespace(api)
    yield made
    api.delete({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made}})


@pytest.fixture
def nodes(plane: ControlPlane, namespace: str) -> Iterator[StandInNodes]:
    with StandInNodes(plane.api, namespace, controllers=plane.controllers) as running:
        yield running


@pytest.fixture
def operator_values(namespace: str) -> dict[str, Any]:
    """Values of `release`: an operator that ignores other tests' objects."""
    return {"operator": {**PENDING["operator"], "watchNamespaces": [namespace]}}


@pytest.fixture
def release(plane: ControlPlane, namespace: str, operator_values: dict[str, Any]) -> Iterator[None]:
    """Installs the chart as the release `llm` without a model: the operator's rights and
    Deployment.
    """
    with helm_of(plane, namespace) as (config, chart):
        config.install(chart, "llm", {**OPERATOR_ONLY, **operator_values})
        yield
        config.uninstall("llm", ignore_not_found=True)


@pytest.fixture
async def world(
    plane: ControlPlane, namespace: str, nodes: StandInNodes, release: None
) -> AsyncIterator[World]:
    """A leading operator, with a scheduler that it can reach."""
    async with scheduler(quick(heartbeat_s=0.5, lease_s=30.0)) as net:
        with OperatorProcess(plane, namespace, scheduler=net.address) as operator:
            await asyncio.to_thread(operator.wait_until_it_leads)
            yield World(plane, namespace, nodes, net, operator)


def make_namespace(api: Api) -> str:
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    meta = {"generateName": "millrace-test-", "labels": restricted}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
    name = str(api.call("POST", "/api/v1/namespaces", body)["metadata"]["name"])
    # Pods need it; the controller manager may not have made it yet, or may not run.
    api.apply(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        },
        force=True,
    )
    return name


def _install_crds(api: Api) -> None:
    for crd in crds():
        api.apply(crd, manager="millrace-operator", force=True)
    for crd in crds():
        eventually(lambda crd=crd: _established(api, crd), what=crd["metadata"]["name"])


def _established(api: Api, crd: Object) -> bool:
    name = crd["metadata"]["name"]
    found = api.get(crd["apiVersion"], crd["kind"], "", name)
    return condition(found, "Established") == "True"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Prints where the logs of a failed test's servers are, and the operator's actions."""
    report = yield
    given = getattr(item, "funcargs", {})
    if report.failed and isinstance(given.get("plane"), ControlPlane):
        report.sections.append(("control plane", f"logs: {given['plane'].folder}"))
    if report.failed and isinstance(given.get("world"), World):
        world = given["world"]
        report.sections.append(("operator", world.operator.log.read_text()[-4000:]))
        report.sections.append(("objects", yaml.safe_dump(world.states())))
    return report
