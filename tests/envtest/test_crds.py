"""The custom resources at a real API server: defaults, bounds, rules, printed columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.cel_rules import refusals
from support.custom_objects import POOLS, VERSION, crds, merged, pool, service
from support.custom_resources import SCHEMAS, defaulted
from support.kube_api import TABLE, Api, Object, Refused, condition

KINDS = ("ModelService", *POOLS)
PLURALS = ("modelservices", "prefillgroups", "decodepools", "kvpworkerpools")

LONG = {"tokensPerWorker": 1024, "maxWorkersPerRequest": 4}

NO_PREFILL = "decode.role decode needs prefill; role mixed computes prompts and allows no prefill"

#: A service of mixed instances.
MIXED = service(prefill=None, decode={"role": "mixed"})

OWN_PODS = {"stages": 2, "stagePods": "Own"}

#: Objects that break only one rule, and the rule's message.
RANKS_ON_GPUS = (
    "gpus must be 0 or at least tensorParallel times stages: each rank of each stage needs a GPU"
)
BROKEN: list[tuple[str, Object]] = [
    (
        "the name is a DNS label of at most 44 characters that starts with a letter",
        service("s" * 45),
    ),
    ("the name is a DNS label of at most 44 characters that starts with a letter", service("1st")),
    *[
        ("the name is a DNS label of at most 52 characters that starts with a letter", pool(k, n))
        for k in POOLS
        for n in ("p" * 53, "a.b", "0p")
    ],
    (
        "model.uri is a hub id (org/name) or an absolute path",
        service(model={"uri": "https://example.org/model"}),
    ),
    (
        "weights takes one of persistentVolumeClaim, hostPath, image, hub",
        service(weights={"hub": {}, "hostPath": {"path": "/models"}}),
    ),
    (
        "kvp cannot hold maxContextTokens: raise tokensPerWorker or maxWorkersPerRequest",
        service(model={"maxContextTokens": 4097}, kvp=LONG),
    ),
    (
        "prefill and decode must both scale to zero, or neither",
        service(prefill={"autoscaling": {"scaleToZero": {"enabled": True}}}),
    ),
    *[
        (
            "gateway.canary.service is none of gateway.models",
            service(gateway={"canary": {"service": "next", "percent": 5}, **models}),
        )
        for models in ({}, {"models": [{"service": "other"}]})
    ],
    (
        "scaleToZero needs gateway.parking.timeoutSeconds above 0",
        service(
            prefill={"autoscaling": {"scaleToZero": {"enabled": True}}},
            decode={"autoscaling": {"scaleToZero": {"enabled": True}}},
            gateway={"parking": {"timeoutSeconds": 0}},
        ),
    ),
    (
        "claimName and url exclude each other",
        service(gateway={"files": {"claimName": "files", "url": "s3://bucket/files"}}),
    ),
    (NO_PREFILL, service(prefill=None)),
    (NO_PREFILL, service(decode={"role": "mixed"})),
    *[
        (
            "backlogSeconds, utilization and ttftSloRatio are signals of role mixed",
            pool("DecodePool", autoscaling={"metrics": [{"name": name, "target": "0.5"}]}),
        )
        for name in ("backlogSeconds", "utilization", "ttftSloRatio")
    ],
    (RANKS_ON_GPUS, pool("PrefillGroup", stages=2, gpus=1)),
    (RANKS_ON_GPUS, service(decode={"stages": 2, "tensorParallel": 2, "gpus": 3})),
    (RANKS_ON_GPUS, pool("PrefillGroup", tensorParallel=8, gpus=4)),
    (RANKS_ON_GPUS, pool("DecodePool", tensorParallel=2, gpus=1)),
    (RANKS_ON_GPUS, service(decode={"tensorParallel": 2, "gpus": 1})),
    *[
        (
            f"the name has at most 37 characters where spec.{part}.stagePods is Own",
            service("s" * 38, **{part: OWN_PODS}),
        )
        for part in ("prefill", "decode")
    ],
    *[
        (message, pool(kind, name, **settings))
        for kind in ("PrefillGroup", "DecodePool")
        for message, name, settings in (
            ("the name has at most 45 characters where spec.stagePods is Own", "p" * 46, OWN_PODS),
            (
                "stagePods is Own and stages is 1: an instance of one stage has one pod",
                "pool",
                {"stagePods": "Own"},
            ),
            (
                "gpus must be divisible by stages where stagePods is Own: each pod gets the same "
                "number",
                "pool",
                {**OWN_PODS, "gpus": 3},
            ),
        )
    ],
    *[
        (
            "minReplicas must be <= maxReplicas",
            pool(kind, autoscaling={"minReplicas": 9, "maxReplicas": 8}),
        )
        for kind in ("PrefillGroup", "DecodePool")
    ],
    (
        "minReplicas 0 needs scaleToZero.enabled",
        pool("DecodePool", autoscaling={"minReplicas": 0}),
    ),
    (
        "warmSpares must be <= autoscaling.maxReplicas",
        pool("KVPWorkerPool", warmSpares=5, maxWorkersPerRequest=4, autoscaling={"maxReplicas": 4}),
    ),
    (
        "maxWorkersPerRequest must be <= autoscaling.maxReplicas",
        pool("KVPWorkerPool", maxWorkersPerRequest=5, autoscaling={"maxReplicas": 4}),
    ),
    *[
        (
            "target is between 0.05 and 1, that of backlogSeconds at least 0.001",
            pool(kind, autoscaling={"metrics": [{"name": name, "target": target}]}),
        )
        for kind, name, target in (
            ("PrefillGroup", "utilization", "1.1"),
            ("PrefillGroup", "backlogSeconds", "0.0009"),
            ("DecodePool", "kvUtilization", "0.04"),
        )
    ],
]

#: Changes that are allowed once, and the changes that are not.
CHANGED: list[tuple[str, Object, Object]] = [
    ("model.name is immutable", service(), {"spec": {"model": {"name": "other"}}}),
    ("role is immutable", pool("DecodePool"), {"spec": {"role": "mixed"}}),
    (
        "role is immutable",
        MIXED,
        {"spec": {"decode": {"role": "decode"}, "prefill": {}}},
    ),
    *[
        ("stagePods is immutable", pool(kind, stages=2), {"spec": {"stagePods": "Own"}})
        for kind in ("PrefillGroup", "DecodePool")
    ],
    *[
        ("serviceRef is immutable", pool(kind), {"spec": {"serviceRef": {"name": "other"}}})
        for kind in POOLS
    ],
]

#: As close to the rules as is allowed.
ALLOWED = [
    service("s" * 37, prefill=OWN_PODS, decode=OWN_PODS),
    pool("DecodePool", "p" * 45, stages=2, stagePods="Own", gpus=4),
    service("s" * 44),
    service(model={"uri": "org/name"}, weights={"hub": {"cache": {"sizeLimit": "20Gi"}}}),
    service(model={"maxContextTokens": 4096}, kvp=LONG),
    service(
        prefill={"autoscaling": {"scaleToZero": {"enabled": True}, "minReplicas": 0}},
        decode={"autoscaling": {"scaleToZero": {"enabled": True}, "minReplicas": 0}},
    ),
    MIXED,
    service(
        prefill=None,
        decode={
            "role": "mixed",
            "autoscaling": {
                "scaleToZero": {"enabled": True},
                "minReplicas": 0,
                "metrics": [{"name": "backlogSeconds", "target": "0.001"}],
            },
        },
    ),
    service(prefill={"template": {"spec": {"anything": [{"goes": 1}]}}}),
    pool("PrefillGroup", "p" * 52, autoscaling={"minReplicas": 8}),
    pool("KVPWorkerPool", warmSpares=32, maxWorkersPerRequest=32),
    pool("DecodePool", autoscaling={"metrics": [{"name": "tbtSloRatio", "target": "0.05"}]}),
]

#: Values past a bound, of the wrong type or unknown, with the field in the answer.
REFUSED: list[tuple[str, Object]] = [
    ("spec.model.uri", service(model={"uri": None})),
    ("spec.decode", service(decode=None)),
    ("spec.decode.role", service(decode={"role": "pair"})),
    ("spec.role", pool("PrefillGroup", role="mixed")),
    ("spec.scheduling.policy", service(scheduling={"policy": "lifo"})),
    ("spec.slo.ttftSeconds", service(slo={"ttftSeconds": "soon"})),
    ("spec.slo.tbtMilliseconds", service(slo={"tbtMilliseconds": 0})),
    ("spec.gateway.port", service(gateway={"port": 65536})),
    ("spec.weights.hostPath.path", service(weights={"hostPath": {"path": "models"}})),
    ("duplicate", service(sloClasses=[{"name": "a"}, {"name": "a"}])),
    ("spec.prefil", service(prefil={})),
    ("spec.replicas", pool("PrefillGroup", replicas=1001)),
    ("spec.replicas", pool("PrefillGroup", replicas=-1)),
    ("spec.tensorParallel", pool("DecodePool", tensorParallel=3)),
    ("spec.autoscaling.mode", pool("DecodePool", autoscaling={"mode": "Sometimes"})),
    ("spec.drain.onTimeout", pool("KVPWorkerPool", drain={"onTimeout": "Kill"})),
    (
        "spec.autoscaling.metrics[0].name",
        pool("PrefillGroup", autoscaling={"metrics": [{"name": "kvUtilization", "target": "1"}]}),
    ),
    ("spec.serviceRef", pool("PrefillGroup", serviceRef=None)),
]


def dry(api: Api, manifest: Object) -> Object:
    """Creates the object as a dry run, and returns it."""
    path = api.path(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    return api.call("POST", path, manifest, query=query)


@pytest.mark.parametrize("crd", crds(), ids=lambda crd: crd["metadata"]["name"])
def test_the_schema_is_accepted_without_reservation(api: Api, crd: Object) -> None:
    found = api.get(crd["apiVersion"], crd["kind"], "", crd["metadata"]["name"])
    assert condition(found, "Established") == condition(found, "NamesAccepted") == "True"
    assert condition(found, "NonStructuralSchema") == ""


def test_three_lines_are_a_model_service_and_the_rest_is_default(api: Api) -> None:
    spec = dry(api, service())["spec"]
    assert spec["model"] == {
        "name": "tiny",
        "uri": "/models/tiny",
        "revision": "",
        "maxContextTokens": 0,
    }
    assert spec["slo"] == {"ttftSeconds": "10", "tbtMilliseconds": 100}
    assert spec["gateway"]["parking"] == {"timeoutSeconds": 300, "maxRequests": 1024}
    assert spec["scheduling"]["policy"] == "millrace" and not spec["paused"]
    for section in ("prefill", "decode"):
        autoscaling = spec[section]["autoscaling"]
        assert autoscaling["mode"] == "Internal" and autoscaling["minReplicas"] == 1
        assert autoscaling["scaleToZero"] == {"enabled": False, "idleSeconds": 600}
        assert autoscaling["scaleDown"]["stabilizationWindowSeconds"] == 300
        assert spec[section]["drain"] == {"timeoutSeconds": 600, "onTimeout": "Migrate"}
        assert "replicas" not in spec[section] and "gpus" not in spec[section]
    assert "kvp" not in spec


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_needs_only_its_service(api: Api, kind: str) -> None:
    spec = dry(api, pool(kind))["spec"]
    assert spec["replicas"] == 1
    assert spec["rollout"] == {"maxSurge": 1}
    assert spec["autoscaling"]["maxReplicas"] == {"PrefillGroup": 8, "DecodePool": 16}.get(kind, 32)


@pytest.mark.parametrize(("message", "manifest"), BROKEN)
def test_a_rule_refuses_with_its_message(api: Api, message: str, manifest: Object) -> None:
    with pytest.raises(Refused) as refused:
        dry(api, manifest)
    assert refused.value.status == 422
    assert message in refused.value.message
    # One rule only: the rest of the object is valid.
    assert refused.value.message.count("Invalid value") == 1


@pytest.mark.parametrize(("message", "before", "change"), CHANGED)
def test_what_is_fixed_can_not_be_changed(
    api: Api, namespace: str, message: str, before: Object, change: Object
) -> None:
    manifest = merged(before, {"metadata": {"namespace": namespace}})
    api.apply(manifest)
    with pytest.raises(Refused, match=message):
        api.merge(manifest, change)
    api.merge(manifest, {"metadata": {"labels": {"any": "change"}}})  # the rest is free


def test_the_evaluator_of_the_other_tests_says_the_same() -> None:
    for message, made in BROKEN:
        (found,) = _refusals(made)
        assert found.endswith(message)
    assert [_refusals(made) for made in ALLOWED] == [[]] * len(ALLOWED)


def _refusals(made: Object) -> list[str]:
    schema = SCHEMAS[made["kind"]]
    return refusals(schema, defaulted(schema, made))


def test_every_rule_is_among_those_tried() -> None:
    tried = {message for message, *_ in (*BROKEN, *CHANGED)}
    assert {message for crd in crds() for message in messages(crd)} == tried


def messages(node: Any) -> Iterator[str]:
    """Returns all CEL rules in a CRD."""
    if isinstance(node, dict):
        for rule in node.get("x-kubernetes-validations", ()):
            yield rule["message"]
        for child in node.values():
            yield from messages(child)
    elif isinstance(node, list):
        for child in node:
            yield from messages(child)


@pytest.mark.parametrize("manifest", ALLOWED)
def test_what_is_just_within_the_rules_is_allowed(api: Api, manifest: Object) -> None:
    dry(api, manifest)


@pytest.mark.parametrize(("where", "manifest"), REFUSED)
def test_values_out_of_bounds_are_refused_by_name(api: Api, where: str, manifest: Object) -> None:
    with pytest.raises(Refused) as refused:
        dry(api, manifest)
    assert refused.value.status in (400, 422)
    assert where.lower() in refused.value.message.lower()


def test_status_is_written_apart_from_the_spec(api: Api, namespace: str) -> None:
    group = pool("PrefillGroup", namespace=namespace)
    made = api.apply(group)
    changed = {"spec": {"replicas": 5}, "status": {"replicas": 1, "readyReplicas": 1}}
    after = api.merge(group, changed, "status")
    assert after["status"]["readyReplicas"] == 1 and after["spec"]["replicas"] == 1
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
    after = api.merge(group, {**changed, "status": {"readyReplicas": 7}})
    assert after["status"]["readyReplicas"] == 1 and after["spec"]["replicas"] == 5
    assert after["metadata"]["generation"] == made["metadata"]["generation"] + 1


@pytest.mark.parametrize("kind", POOLS)
def test_the_scale_subresource_is_that_of_the_pool(api: Api, namespace: str, kind: str) -> None:
    manifest = pool(kind, namespace=namespace, autoscaling={"mode": "External"})
    api.apply(manifest)
    status = {"replicas": 2, "selector": "millrace.dev/pool=pool"}
    api.merge(manifest, {"status": status}, "status")
    path = api.path(VERSION, kind, namespace, "pool", "scale")
    scale = api.call("GET", path)
    assert scale["spec"] == {"replicas": 1} and scale["status"] == status
    api.call("PUT", path, {**scale, "spec": {"replicas": 4}})
    found = api.get(VERSION, kind, namespace, "pool")
    assert found is not None and found["spec"]["replicas"] == 4


def test_kubectl_get_shows_what_matters(api: Api, namespace: str) -> None:
    manifest = service(namespace=namespace)
    api.apply(manifest)
    ready = {
        "type": "Available",
        "status": "True",
        "reason": "Served",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"phase": "Ready", "prefillReady": "1/1", "decodeReady": "2/3", "conditions": [ready]}
    api.merge(manifest, {"status": status}, "status")
    assert table(api, "ModelService", namespace) == {
        "Name": "chat",
        "Model": "tiny",
        "Prefill": "1/1",
        "Decode": "2/3",
        "KVP": None,
        "Phase": "Ready",
        "Available": "True",
    }
    api.apply(pool("DecodePool", namespace=namespace, replicas=3))
    row = table(api, "DecodePool", namespace)
    assert row["Service"] == "chat" and row["Replicas"] == 3 and row["Mode"] == "Internal"
    assert {"Ready", "Desired", "Updated", "Draining", "Available"} <= row.keys()


def table(api: Api, kind: str, namespace: str) -> dict[str, Any]:
    """Returns the first row as `kubectl get` prints it, without the age."""
    found = api.call("GET", api.path(VERSION, kind, namespace), accept=TABLE)
    columns = [c["name"] for c in found["columnDefinitions"] if c["priority"] == 0]
    row = dict(zip(columns, found["rows"][0]["cells"], strict=False))
    row.pop("Age")
    return row


def test_every_field_is_described_in_openapi(api: Api) -> None:
    """Returns the texts that `kubectl explain` reads."""
    document = api.call("GET", "/openapi/v3/apis/millrace.dev/v1alpha1")
    schemas = document["components"]["schemas"]
    for kind in KINDS:
        ours = next(s for name, s in schemas.items() if name.endswith(f".{kind}"))
        for section in ("spec", "status"):
            assert list(undescribed(ours["properties"][section], section)) == []


def undescribed(node: Object, path: str) -> Iterator[str]:
    if not node.get("description"):
        yield path
    for name, child in node.get("properties", {}).items():
        yield from undescribed(child, f"{path}.{name}")
    if node.get("items", {}).get("properties"):
        yield from undescribed(node["items"], f"{path}[]")


def test_names_are_short_and_in_one_category(api: Api) -> None:
    served = api.call("GET", "/apis/millrace.dev/v1alpha1")["resources"]
    by_name = {entry["name"]: entry for entry in served if "/" not in entry["name"]}
    assert tuple(by_name[plural]["shortNames"] for plural in PLURALS) == (
        ["ms"],
        ["pg"],
        ["dp"],
        ["kvp"],
    )
    assert all(entry["categories"] == ["millrace"] for entry in by_name.values())
