"""The chart's roles are exactly the operator's needs: by the API server's audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.kube_api import MERGE, Object, soon
from support.operator_world import MANUAL, World
from support.releases import PENDING

Right = tuple[str, str, str]  # API group, resource, verb

#: Rights that this test does not use: a ModelService always has these two pools, so none of them
#: retires, and one rule for all pools is easier to read than a rule without this right.
UNUSED = {
    ("millrace.dev", "prefillgroups", "delete"),
    ("millrace.dev", "decodepools", "delete"),
    # Of instances whose stages have pods of their own.
    ("", "pods", "get"),
    ("apps", "statefulsets", "delete"),
    *(
        ("leaderworkerset.x-k8s.io", "leaderworkersets", verb)
        for verb in ("get", "list", "create", "patch", "delete")
    ),
}

QUICK = {**MANUAL, "replicas": 2, "drain": {"timeoutSeconds": 0}}


@pytest.fixture(params=["cluster", "namespace"])
def operator_values(request: pytest.FixtureRequest, namespace: str) -> dict[str, Any]:
    """An operator of the whole cluster, and an operator of its own namespace."""
    watched = [] if request.param == "cluster" else [namespace]
    return {"operator": {**PENDING["operator"], "watchNamespaces": watched}}


async def test_every_right_is_used_and_none_is_missed(audit: None, world: World) -> None:
    await live(world)
    made = world.plane.calls_of(world.namespace, "llm-operator")
    forbidden = [
        call["requestURI"]
        for call in made
        if call["annotations"].get("authorization.k8s.io/decision") == "forbid"
    ]
    assert forbidden == []
    used = {right for call in made for right in rights_of(call)}
    granted = {right for role in roles(world) for right in rights_in(role)}
    assert used - granted == set()
    assert granted - used == UNUSED


async def live(world: World) -> None:
    """Takes a service through its life: built, scaled, rolled out, shrunk, deleted."""
    await world.serve(prefill=QUICK, decode=QUICK, kvp=QUICK)
    world.apply(
        decode={
            "template": {
                "spec": {"containers": [{"name": "millrace", "env": [{"name": "A", "value": "1"}]}]}
            }
        }
    )
    await world.settled()
    world.scale("PrefillGroup", 1)
    await soon(lambda: len(world.pods("PrefillGroup")) == 1, 60.0, what="scaled in")
    path = world.api.path("millrace.dev/v1alpha1", "ModelService", world.namespace, "chat")
    world.api.call("PATCH", path, {"spec": {"kvp": None}}, content_type=MERGE)
    await soon(lambda: "KVPWorkerPool/chat-kvp" not in world.states(), 60.0, what="retired")
    world.api.delete(world.service())


def rights_of(call: Object) -> Iterator[Right]:
    """Returns a call's rights; the apply of a new object also needs the right to create it."""
    where = call["objectRef"]
    resource = where["resource"]
    if "subresource" in where:
        resource += f"/{where['subresource']}"
    yield where.get("apiGroup", ""), resource, call["verb"]
    if call["verb"] == "patch" and call["responseStatus"]["code"] == 201:
        yield where.get("apiGroup", ""), resource, "create"


def roles(world: World) -> list[Object]:
    """Returns the release's rights."""
    version = "rbac.authorization.k8s.io/v1"
    found = world.api.list(version, "Role", world.namespace)
    found += world.api.list(version, "ClusterRole")
    return [
        role
        for role in found
        if role["metadata"].get("annotations", {}).get("meta.helm.sh/release-namespace")
        == world.namespace
    ]


def rights_in(role: Object) -> Iterator[Right]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb
