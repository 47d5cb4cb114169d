"""values.yaml and its schema: descriptions of every value, and refused values."""

import json
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from millrace_operator.manifests.templates import merged as operators_merge
from millrace_operator.schema.values import as_file
from support.chart import CHART, objects, render, values_of
from support.custom_objects import merged

MINIMAL = values_of("minimal")
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_the_schema_is_what_the_code_writes() -> None:
    """After a wanted change, run python -m millrace_operator.schema.values FILE."""
    assert (CHART / "values.schema.json").read_text() == as_file()


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}{name}", field
        yield from fields(field, f"{path}{name}.")


def test_every_value_is_described() -> None:
    assert not [path for path, field in fields(SCHEMA) if not field.get("description")]


def test_values_yaml_shows_every_value() -> None:
    """Looks for a value, or for a comment where the CRDs have the default."""
    text = (CHART / "values.yaml").read_text()
    assert set(VALUES) == set(SCHEMA["properties"]) - {"global"}
    for section, field in SCHEMA["properties"].items():
        for name in field.get("properties", {}):
            assert name in VALUES[section] or f"# {name}: " in text or f"{name}: " in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"modle": {}}, "additional properties 'modle' not allowed"),
        ({"model": {"name": "a", "uri": "not an id"}}, "/model/uri"),
        ({"model": {"name": ""}}, "model.name is empty"),
        ({"prefill": {"gpus": -1}}, "/prefill/gpus"),
        ({"prefill": {"gpus": "two"}}, "/prefill/gpus"),
        ({"prefill": {"tensorParallel": 3}}, "/prefill/tensorParallel"),
        (
            {"prefill": {"tensorParallel": 8, "gpus": 4}},
            "prefill.gpus is 4, but prefill.tensorParallel is 8",
        ),
        ({"prefill": {"stagePods": "Apart"}}, "/prefill/stagePods"),
        ({"kvp": {"stagePods": "Own"}}, "additional properties 'stagePods' not allowed"),
        (
            {"prefill": {"stagePods": "Own"}},
            "prefill.stagePods is Own, but prefill.stages is 1: an instance of one stage has one",
        ),
        (
            {"decode": {"stagePods": "Own", "stages": 3, "gpus": 4}},
            "decode.stagePods is Own, but decode.gpus is 4 and decode.stages 3: each pod gets the",
        ),
        (
            {"decode": {"stages": 2, "tensorParallel": 2, "gpus": 3}},
            "decode.gpus is 3, but decode.tensorParallel is 2 and decode.stages 2: each rank of "
            "each stage needs a GPU",
        ),
        ({"prefill": {"autoscaling": {"mode": "Sometimes"}}}, "/prefill/autoscaling/mode"),
        ({"prefill": {"autoscaling": {"maxReplica": 4}}}, "'maxReplica' not allowed"),
        ({"decode": {"drain": {"onTimeout": "Panic"}}}, "/decode/drain/onTimeout"),
        ({"decode": {"rdma": {"resource": "hca"}}}, "/decode/rdma/resource"),
        ({"decode": {"resources": {"limits": {"memory": "much"}}}}, "/limits/memory"),
        ({"prefill": {"hugepages": {"size": "4Ki", "amount": "1Gi"}}}, "/hugepages/size"),
        ({"prefill": {"hugepages": {"size": "2Mi"}}}, "needs size and amount"),
        (
            {"prefill": {"hugepages": {"size": "2Mi", "amount": "1Gi"}}},
            "give prefill.resources.requests",
        ),
        ({"weights": {"hub": {}, "hostPath": {"path": "/m"}}}, "/weights"),  # two of them
        (
            {"weights": {"hostPath": {"path": "/m"}}},
            "give the path of the model there",
        ),
        (
            {"model": {"uri": "/opt/model"}, "weights": {"hub": {"secretRef": {"name": "token"}}}},
            "weights.hub is for a hub id",
        ),
        ({"model": {"uri": "/models/a"}}, "mounts nothing at /models"),
        ({"settings": {"scheduler.max_queue_requests": 4096}}, "got number, want string"),
        ({"scheduling": {"policy": "random"}}, "/scheduling/policy"),
        ({"gateway": {"port": 70000}}, "/gateway/port"),
        ({"image": {"pullPolicy": "Often"}}, "/image/pullPolicy"),
        ({"image": {"registry": "https://registry.example.com/a"}}, "/image/registry"),
        ({"scheduler": {"replicas": 0}}, "/scheduler/replicas"),
        ({"gateway": {"keys": {"required": True}}}, "required is true, but nobody has a key"),
        ({"gateway": {"files": {"url": "s3:/bucket"}}}, "/gateway/files/url"),
        ({"redis": {"maxmemory": "4gb"}}, "redis.maxmemory is 4gb, but redis.resources"),
        (
            {"redis": {"resources": {"limits": {"memory": 2**31}}}},
            "redis.maxmemory is 3gb, but redis.resources.limits.memory is 2147483648",
        ),
        (
            {
                "redis": {"enabled": False},
                "externalRedis": {"url": "redis://r:6379", "existingSecret": "s"},
            },
            "externalRedis takes one of url and existingSecret",
        ),
        ({"redis": {"image": "redis"}}, "/redis/image"),  # without a version
        ({"redis": {"enabled": False}}, "give externalRedis.url or externalRedis.existingSecret"),
        ({"externalRedis": {"url": "redis://r:6379"}}, "redis.enabled is true"),
        ({"externalRedis": {"url": "http://r"}}, "/externalRedis/url"),
        ({"externalRedis": {"url": "redis+server://r"}}, "/externalRedis/url"),
        ({"externalRedis": {"ports": [70000]}}, "/externalRedis/ports"),
        (
            {"tls": {"existingSecret": "t", "certManager": {"enabled": True}}},
            "one of existingSecret and certManager",
        ),
        ({"operator": {"watchNamespaces": ["elsewhere"]}}, "lacks llm"),
        ({"httpRoute": {"enabled": True}}, "name the Gateway"),
        ({"monitoring": {"alerts": {"ttftAttainment": 2}}}, "/monitoring/alerts/ttftAttainment"),
        ({"networkPolicy": {"hub": "perhaps"}}, "/networkPolicy/hub"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_word_on_it(given: dict[str, Any], says: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(merged(MINIMAL, given))
    assert says in str(refused.value)


SECTIONS = [
    *((name,) for name, value in VALUES.items() if isinstance(value, dict)),
    *(
        (name, inner)
        for name, section in VALUES.items()
        if isinstance(section, dict)
        for inner, value in section.items()
        if isinstance(value, dict | list)
    ),
]


@pytest.mark.parametrize("path", SECTIONS, ids=".".join)
def test_a_section_without_a_value_is_named_or_does_no_harm(path: tuple[str, ...]) -> None:
    """`prefill:` with nothing below it: Helm takes away the section and its defaults."""
    given: Any = None
    if len(path) > 1:
        given = {**MINIMAL.get(path[0], {}), path[1]: None}
    try:
        render({**MINIMAL, path[0]: given})
    except helm.HelmError as refused:
        assert f"missing property '{path[-1]}'" in str(refused)


@pytest.mark.parametrize(
    "given",
    [
        {"image": {"registry": "registry.example.com:5000/team/a/"}},
        {"image": {"registry": "localhost"}},
        {"gateway": {"keys": {"required": True, "secretRef": {"name": "api-keys"}}}},
        {"gateway": {"keys": {"required": True}}, "settings": {"auth.stored_keys": "on"}},
        {
            "gateway": {"keys": {"required": True}},
            "tenants": [{"name": "acme", "keySha256": ["0a" * 32]}],
        },
        {"redis": {"maxmemory": "2g", "resources": {"limits": {"memory": "2Gi"}}}},
        {"redis": {"maxmemory": "", "resources": {"limits": {"memory": "1Gi"}}}},
        {"redis": {"resources": {"limits": None}}},
        {"redis": {"maxmemory": "7gb", "resources": {"limits": {"memory": "8Gi"}}}},
    ],
    ids=str,
)
def test_sense_is_not_refused(given: dict[str, Any]) -> None:
    assert render(merged(MINIMAL, given))


def test_schedulers_may_stand_by() -> None:
    (service,) = [
        found
        for found in objects(merged(MINIMAL, {"scheduler": {"replicas": 2}}))
        if found["kind"] == "ModelService"
    ]
    assert service["spec"]["scheduler"]["replicas"] == 2


def test_without_a_model_there_is_no_service_and_no_way_in() -> None:
    kinds = {manifest["kind"] for manifest in objects({})}
    assert "Deployment" in kinds and "StatefulSet" in kinds and "ModelService" not in kinds
    with pytest.raises(helm.HelmRenderError, match="need a gateway"):
        render({"ingress": {"enabled": True}})


def test_the_notes_are_three_commands() -> None:
    for values in (MINIMAL, {}):
        notes = render(values)["NOTES.txt"]
        assert len([line for line in notes.splitlines() if line.startswith("  ")]) == 3


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({}, ""),
        ({"ingress": {"enabled": True}}, "the Ingress lets everybody in"),
        (
            {"httpRoute": {"enabled": True, "parentRefs": [{"name": "web"}]}},
            "the HTTPRoute lets everybody in",
        ),
        (
            {
                "ingress": {"enabled": True},
                "gateway": {"keys": {"required": True, "secretRef": {"name": "api-keys"}}},
            },
            "",
        ),
    ],
    ids=str,
)
def test_the_notes_warn_of_a_way_in_without_keys(given: dict[str, Any], warns: str) -> None:
    notes = render(merged(MINIMAL, given))["NOTES.txt"]
    assert warns in notes
    assert bool(warns) == ("need no key" in notes)


def test_the_example_at_the_top_of_values_is_the_minimal_profile() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    example = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")][:3]
    assert yaml.safe_load("\n".join(example)) == MINIMAL


@pytest.mark.parametrize("name", ["nodeSelector", "tolerations", "priorityClassName"])
def test_where_pods_go_reaches_all_of_them(name: str) -> None:
    value = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}], "priorityClassName": "p"}
    parts = ("prefill", "decode", "gateway", "scheduler", "operator", "redis")
    found = objects(merged(MINIMAL, {part: {name: value[name]} for part in parts}))
    for manifest in found:
        if manifest["kind"] == "ModelService":
            for part in parts[:4]:
                assert manifest["spec"][part]["template"]["spec"][name] == value[name]
        elif manifest["kind"] in ("Deployment", "StatefulSet"):
            assert manifest["spec"]["template"]["spec"][name] == value[name]


def test_a_part_spreads_its_own_pods() -> None:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    values = merged(MINIMAL, {"decode": {"topologySpreadConstraints": [constraint]}})
    (service,) = [o for o in objects(values) if o["kind"] == "ModelService"]
    (made,) = service["spec"]["decode"]["template"]["spec"]["topologySpreadConstraints"]
    assert made == {
        **constraint,
        "labelSelector": {
            "matchLabels": {
                "millrace.dev/service": "millrace",
                "app.kubernetes.io/component": "decode",
            }
        },
    }


def test_a_template_of_the_users_goes_over_what_values_make() -> None:
    given = {"podLabels": {"a": "b"}, "template": {"spec": {"hostIPC": True}}}
    values = merged(MINIMAL, {"decode": {**given, "resources": {"limits": {"memory": "8Gi"}}}})
    (service,) = [o for o in objects(values) if o["kind"] == "ModelService"]
    template = service["spec"]["decode"]["template"]
    assert template["metadata"]["labels"] == {"a": "b"}
    assert template["spec"]["hostIPC"] is True
    assert template["spec"]["containers"][0]["resources"] == {"limits": {"memory": "8Gi"}}


@pytest.mark.parametrize("part", ["prefill", "decode", "kvp", "gateway", "scheduler"])
def test_containers_of_a_template_keep_what_values_make(part: str) -> None:
    """A sidecar once took the place of the main container with its env and resources."""
    given = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
        "resources": {"requests": {"memory": "8Gi"}},
    }
    pool = {"rdma": {"enabled": True}, "hugepages": {"size": "2Mi", "amount": "4Gi"}}
    given |= {"enabled": True} if part == "kvp" else {}
    given |= pool if "rdma" in VALUES[part] else {}
    main = {
        "name": "millrace",
        "env": [{"name": "C", "value": "2"}, {"name": "A", "value": "2"}],
        "resources": {"limits": {"cpu": 2}},
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "securityContext": {"capabilities": {"drop": ["ALL", "NET_RAW"]}},
    }
    over = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "containers": [{"name": "sidecar", "image": "other:1"}, main],
            "volumes": [{"name": "more", "emptyDir": {}}, {"name": "hugepages", "emptyDir": {}}],
            "imagePullSecrets": [{"name": "theirs"}],
            "securityContext": {"fsGroup": 1_000_660_000},
        },
    }
    secrets = {"image": {"pullSecrets": [{"name": "ours"}]}}
    plain = _template(merged(MINIMAL, {**secrets, part: given}), part)
    found = _template(merged(MINIMAL, {**secrets, part: {**given, "template": over}}), part)
    assert [one["name"] for one in found["spec"]["containers"]] == ["millrace", "sidecar"]
    values = {one["name"]: one["value"] for one in found["spec"]["containers"][0]["env"]}
    assert values == {"A": "2", "B": "1", "C": "2"}
    assert found == operators_merge(plain, over, "spec.template")


def _template(values: dict[str, Any], part: str) -> dict[str, Any]:
    (service,) = [o for o in objects(values) if o["kind"] == "ModelService"]
    template: dict[str, Any] = service["spec"][part]["template"]
    return template
