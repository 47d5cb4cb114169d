"""The operator's rights: a table, equal to the documentation's."""

import re

import helm_python as helm
import pytest

from millrace_operator.run.kube import RESOURCES
from support.chart import ROOT, Object, find, objects, profile, values_of
from support.helm_cluster import upgraded

POOLS = ("prefillgroups", "decodepools", "kvpworkerpools")
NAMESPACED: dict[tuple[str, str], str] = {
    ("millrace.dev", "modelservices"): "get list watch",
    **{("millrace.dev", pool): "get list watch create patch delete" for pool in POOLS},
    **{("millrace.dev", f"{kind}/status"): "patch" for kind in ("modelservices", *POOLS)},
    **{("millrace.dev", f"{pool}/scale"): "patch" for pool in POOLS},
    ("apps", "statefulsets"): "get list watch create patch delete",
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): "get list create patch delete",
    ("apps", "deployments"): "get list watch create patch",
    ("", "services"): "get list create patch",
    ("", "configmaps"): "get list create patch",
    ("policy", "poddisruptionbudgets"): "get list create patch",
    ("", "pods"): "get list watch delete",
    ("", "resourcequotas"): "list",
    ("events.k8s.io", "events"): "create",
}
ELECTION = {("coordination.k8s.io", "leases"): "create get update"}
CRDS = {("apiextensions.k8s.io", "customresourcedefinitions"): "get patch"}


def table(role: Object) -> dict[tuple[str, str], str]:
    """Returns verbs by group and resource."""
    verbs: dict[tuple[str, str], str] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                before = verbs.get((group, resource), "")
                verbs[group, resource] = f"{before} {' '.join(rule['verbs'])}".strip()
    return verbs


def roles(found: list[Object]) -> list[Object]:
    return [o for o in found if o["kind"] in ("Role", "ClusterRole")]


def test_the_operator_gets_these_rights_and_no_others() -> None:
    found = profile("minimal")
    assert table(find(found, "ClusterRole", "millrace-operator-llm")) == NAMESPACED
    assert table(find(found, "Role", "millrace-operator-election")) == ELECTION
    crds = find(found, "ClusterRole", "millrace-operator-llm-crds")
    assert table(crds) == CRDS
    assert len(crds["rules"][0]["resourceNames"]) == 4
    assert len(roles(found)) == 3


def test_what_the_operator_calls_is_what_it_has_rights_to() -> None:
    called = {
        (r.api_version.rpartition("/")[0], r.plural): r.namespaced for r in RESOURCES.values()
    }
    granted = {(g, r) for g, r in {**NAMESPACED, **ELECTION, **CRDS} if "/" not in r}
    assert set(called) == granted


@pytest.mark.parametrize("name", ["minimal", "everything"])
def test_no_rights_to_everything_and_none_to_secrets(name: str) -> None:
    for role in roles(profile(name)):
        for rule in role["rules"]:
            said = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not any("*" in word for word in said)
            assert "secrets" not in rule["resources"]
            assert not {"bind", "escalate", "impersonate"} & set(rule["verbs"])


def test_in_named_namespaces_the_rights_end_there() -> None:
    found = profile("everything")
    assert [o["metadata"]["name"] for o in found if o["kind"] == "ClusterRole"] == [
        "llm-operator-llm-crds"
    ]
    for namespace in ("llm", "research"):
        (role,) = [
            o
            for o in roles(found)
            if o["metadata"].get("namespace") == namespace and "-election" not in str(o["metadata"])
        ]
        assert table(role) == NAMESPACED


def test_a_second_operator_of_all_namespaces_is_refused() -> None:
    """Two would undo each other's work for ever."""
    values = values_of("minimal")
    others = [
        found
        for found in objects(values, name="first", namespace="models")
        if found["kind"] == "ClusterRole"
    ]
    assert len(others) == 2
    with pytest.raises(helm.HelmError, match="the operator of release first serves all namespaces"):
        upgraded(values, {}, others)
    own = [found for found in objects(values) if found["kind"] == "ClusterRole"]
    assert upgraded(values, {}, own)
    for operator in ({"enabled": False}, {"watchNamespaces": ["llm"]}):
        assert upgraded({**values, "operator": operator}, {}, others)


def test_every_binding_is_of_a_role_to_the_operators_account() -> None:
    for name in ("minimal", "everything"):
        found = profile(name)
        (account,) = [o["metadata"] for o in found if o["kind"] == "ServiceAccount"]
        subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": "llm"}
        for binding in found:
            if binding["kind"].endswith("Binding"):
                assert binding["subjects"] == [subject]
                ref = binding["roleRef"]
                assert any(
                    o["kind"] == ref["kind"] and o["metadata"]["name"] == ref["name"] for o in found
                )


def test_a_release_without_the_operator_grants_nothing() -> None:
    found = objects({**values_of("minimal"), "operator": {"enabled": False}})
    assert not {"ServiceAccount", "Role", "ClusterRole"} & {o["kind"] for o in found}


def test_the_documentation_has_the_same_table() -> None:
    text = (ROOT / "docs/guides/kubernetes.md").read_text()
    written = {
        (group.replace("core", ""), resource): verbs.replace(",", "")
        for group, resources, verbs in re.findall(
            r"^\| `([\w.-]+)` \| ([^|]+) \| `([a-z, ]+)` \|", text, re.MULTILINE
        )
        for resource in re.findall(r"`([\w/]+)`", resources)
    }
    assert written == {**NAMESPACED, **ELECTION, **CRDS}
