"""The custom resources: an API server's refusals, descriptions for users, rejected values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.rules import DecodeTargets, PrefillTargets
from millrace.core.config import ProxyConfig, SchedulerConfig, load_config
from millrace_operator.schema import definitions
from millrace_operator.schema.__main__ import files
from millrace_operator.schema.pools import KINDS as POOL_SCHEMAS
from millrace_operator.spec import KINDS, SIGNALS, autoscale_config, heard, role_of, signals
from support.custom_resources import SCHEMAS, defaulted, model_service, pool

FOLDER = Path(__file__).parents[2] / "charts" / "millrace" / "crds"
POOLS = tuple(KINDS)


def nodes(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Yields every node of a schema with its path."""
    found = [(path, schema)]
    for name, field in schema.get("properties", {}).items():
        found += nodes(field, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            found += nodes(schema[inner], f"{path}[]")
    return found


ALL = [(kind + path, node) for kind, root in SCHEMAS.items() for path, node in nodes(root)]


def test_the_committed_files_are_what_the_code_makes():
    committed = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert committed == files(), "run `python -m millrace_operator.schema charts/millrace/crds`"


def test_every_field_is_described():
    missing = [p for p, node in ALL if not node.get("description") and not p.endswith(".metadata")]
    assert missing == []


def test_what_a_server_refuses_is_not_there():
    for path, node in ALL:
        assert "type" in node, path
        if path.endswith(".metadata"):
            assert node == {"type": "object"}, path
        if node.get("default") == {}:
            assert "x-kubernetes-validations" not in node, f"{path}: a rule, and default {{}}"
        if "default" in node:
            jsonschema.validate(node["default"], node)
            jsonschema.validate(defaulted(node, node["default"]), node)


def test_what_rules_look_at_is_bounded():
    """The API server estimates a rule's cost by the largest possible value."""
    for path, node in ALL:
        if ".status" in path:
            continue
        match node["type"]:
            case "array":
                assert "maxItems" in node, path
            case "string":
                root = path.count(".") == 1  # apiVersion and kind
                assert "maxLength" in node or "enum" in node or root, path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_lists_of_objects_merge_by_a_key():
    for path, node in ALL:
        if node["type"] == "array" and node["items"]["type"] == "object":
            keys = node["x-kubernetes-list-map-keys"]
            assert set(keys) <= set(node["items"]["required"]), path


def test_names_people_type():
    found = {c["spec"]["names"]["kind"]: c["spec"] for c in definitions()}
    short = {kind: spec["names"]["shortNames"] for kind, spec in found.items()}
    assert short == {
        "ModelService": ["ms"],
        "PrefillGroup": ["pg"],
        "DecodePool": ["dp"],
        "KVPWorkerPool": ["kvp"],
    }
    for kind, spec in found.items():
        assert spec["names"]["categories"] == ["millrace"]
        subresources = spec["versions"][0]["subresources"]
        assert ("scale" in subresources) == (kind in KINDS)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_printed_columns_exist(kind):
    crd = next(c for c in definitions() if c["spec"]["names"]["kind"] == kind)
    known = {path.removeprefix(kind) for path, _ in ALL if path.startswith(kind)}
    for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = column["jsonPath"].partition("[")[0]
        assert path in known or path == ".metadata.creationTimestamp", path


def test_the_operator_and_the_schema_speak_of_the_same_pools_and_signals():
    assert [(k.kind, k.plural, k.role) for k in POOL_SCHEMAS] == [
        (k.kind, k.plural, k.role) for k in KINDS.values()
    ]
    assert {name for k in POOL_SCHEMAS for name in k.targets} == set(SIGNALS)
    for schema in POOL_SCHEMAS:
        spec = SCHEMAS[schema.kind]["properties"]["spec"]["properties"]
        assert ("role" in spec) == bool(schema.mixed_targets) == (schema.kind == "DecodePool")


def test_choices_are_those_of_the_settings():
    scheduling = SCHEMAS["ModelService"]["properties"]["spec"]["properties"]["scheduling"]
    for name in ("policy", "preemption", "planner"):
        for value in scheduling["properties"][name]["enum"]:
            load_config(overrides=[f"scheduler.{name}={value}"])
        default = getattr(SchedulerConfig(), name)
        assert scheduling["properties"][name]["default"] == default
    gateway = SCHEMAS["ModelService"]["properties"]["spec"]["properties"]["gateway"]
    parking = gateway["properties"]["parking"]["properties"]
    assert parking["maxRequests"]["default"] == ProxyConfig().max_parked


@pytest.mark.parametrize("kind", POOLS)
def test_defaults_make_sense_to_the_autoscaler(kind):
    config = autoscale_config(pool(kind))
    assert config.min_replicas <= config.max_replicas


def test_a_decode_pool_follows_the_signals_of_its_role():
    assert [s["name"] for s in signals(pool())] == ["kvUtilization", "tbtSloRatio"]
    assert autoscale_config(pool()).targets == (DecodeTargets(),)
    assert {s["name"] for s in signals(pool(role="mixed"))} == set(SIGNALS)
    assert autoscale_config(pool(role="mixed")).targets == (PrefillTargets(), DecodeTargets())
    listed = [{"name": "backlogSeconds", "target": "2"}, {"name": "kvUtilization", "target": "0.5"}]
    named = pool(role="mixed", autoscaling={"metrics": listed})
    prefill, decode = PrefillTargets(backlog_s=2.0), DecodeTargets(kv_utilisation=0.5)
    assert autoscale_config(named).targets == (prefill, decode)
    load = PoolLoad(role="mixed", backlog_s=1.0, arriving=1.0, kv_utilisation=1.0)
    assert heard(named, load) == PoolLoad(role="mixed", backlog_s=1.0, kv_utilisation=1.0)
    assert heard(pool(role="mixed"), load) == load


def test_three_fields_make_a_service():
    found = model_service()
    jsonschema.validate(found, SCHEMAS["ModelService"])
    assert found["spec"]["gateway"]["replicas"] == 2
    assert "replicas" not in found["spec"]["prefill"]
    assert found["spec"]["decode"]["role"] == "decode"


def test_what_instances_register_as():
    roles = [role_of(pool(kind)) for kind in POOLS]
    assert roles == ["prefill", "decode", "kvp"] and role_of(pool(role="mixed")) == "mixed"


@pytest.mark.parametrize(
    "spec, wrong",
    [
        ({"prefill": {"tensorParallel": 3}}, "3 is not one of"),
        ({"prefill": {"gpus": -1}}, "-1 is less than"),
        ({"decode": {"drain": {"onTimeout": "Kill"}}}, "'Kill' is not one of"),
        ({"decode": {"role": "pair"}}, "'pair' is not one of"),
        ({"decode": {"autoscaling": {"mode": "On"}}}, "'On' is not one of"),
        ({"slo": {"ttftSeconds": "fast"}}, "'fast' does not match"),
        ({"slo": {"ttftSeconds": 10}}, "10 is not of type 'string'"),
        ({"model": {"name": "chat"}}, "'uri' is a required property"),
        ({"redis": {}}, "'secretRef' is a required property"),
    ],
)
def test_what_is_rejected(spec, wrong):
    with pytest.raises(jsonschema.ValidationError, match=wrong):
        jsonschema.validate(model_service(**spec), SCHEMAS["ModelService"])
