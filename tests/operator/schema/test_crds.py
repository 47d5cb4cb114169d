"""The custom resources: an API server's refusals, descriptions for users, rejected values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.rules import DecodeTargets, PrefillTargets
from millrace.core.config import ProxyConfig, SchedulerConfig, load_config
from millrace_operator.schema.__main__ import files
from millrace_operator.schema.crds import definitions
from millrace_operator.schema.pools import KINDS, PoolSpec
from millrace_operator.spec import (
    SIGNALS,
    SpecError,
    autoscale_config,
    followed,
    parse_pool,
    parse_service,
    signals,
)
from support.custom_resources import SCHEMAS, defaulted, model_service, pool

FOLDER = Path(__file__).parents[3] / "charts" / "millrace" / "crds"
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


def test_the_autoscaler_knows_every_signal_of_the_schema():
    autoscaling = SCHEMAS["DecodePool"]["properties"]["spec"]["properties"]["autoscaling"]
    metrics = autoscaling["properties"]["metrics"]
    assert set(metrics["items"]["properties"]["name"]["enum"]) == set(SIGNALS)
    assert metrics["maxItems"] == len(SIGNALS)


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


def spec_of(kind: str = "DecodePool", **spec: Any) -> PoolSpec:
    return parse_pool(pool(kind, **spec)).spec


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_operator_and_the_api_server_fill_in_the_same_defaults(kind):
    parse = parse_service if kind == "ModelService" else parse_pool
    filled = model_service(kvp={}) if kind == "ModelService" else pool(kind)
    least = {"serviceRef": {"name": "chat"}}
    if kind == "ModelService":
        model = {"name": "chat", "uri": "/models/chat"}
        least = {"model": model, "prefill": {}, "decode": {}, "kvp": {}}
    spec = parse({**filled, "spec": least}).spec
    assert spec == parse(filled).spec
    with pytest.raises(ValueError, match="frozen"):
        spec.replicas = 2


@pytest.mark.parametrize("kind", POOLS)
def test_defaults_make_sense_to_the_autoscaler(kind):
    config = autoscale_config(spec_of(kind))
    assert config.min_replicas <= config.max_replicas


def test_a_decode_pool_follows_the_signals_of_its_role():
    assert list(signals(spec_of())) == ["kvUtilization", "tbtSloRatio"]
    assert autoscale_config(spec_of()).targets == (DecodeTargets(),)
    assert signals(spec_of(role="mixed")).keys() == SIGNALS.keys()
    assert autoscale_config(spec_of(role="mixed")).targets == (PrefillTargets(), DecodeTargets())
    listed = [{"name": "backlogSeconds", "target": "2"}, {"name": "kvUtilization", "target": "0.5"}]
    named = spec_of(role="mixed", autoscaling={"metrics": listed})
    prefill, decode = PrefillTargets(backlog_s=2.0), DecodeTargets(kv_utilisation=0.5)
    assert autoscale_config(named).targets == (prefill, decode)
    load = PoolLoad(role="mixed", backlog_s=1.0, arriving=1.0, kv_utilisation=1.0)
    assert followed(named, load) == PoolLoad(role="mixed", backlog_s=1.0, kv_utilisation=1.0)
    assert followed(spec_of(role="mixed"), load) == load


def test_three_fields_make_a_service():
    found = model_service()
    jsonschema.validate(found, SCHEMAS["ModelService"])
    assert found["spec"]["gateway"]["replicas"] == 2
    assert "replicas" not in found["spec"]["prefill"]
    assert found["spec"]["decode"]["role"] == "decode"


def test_what_instances_register_as():
    roles = [spec_of(kind).role for kind in POOLS]
    assert roles == ["prefill", "decode", "kvp"] and spec_of(role="mixed").role == "mixed"


@pytest.mark.parametrize(
    "spec, field, wrong",
    [
        ({"prefill": {"tensorParallel": 3}}, "prefill.tensorParallel", "3; it must be 1, 2, 4 or"),
        ({"prefill": {"gpus": -1}}, "prefill.gpus", "-1; it must be an integer from 0 to 64"),
        ({"prefill": {"gpus": "2"}}, "prefill.gpus", "'2'; it must be an integer from 0 to 64"),
        ({"decode": {"drain": {"onTimeout": "Kill"}}}, "decode.drain.onTimeout", "'Kill'; it must"),
        ({"decode": {"role": "pair"}}, "decode.role", "'pair'; it must be 'decode' or 'mixed'"),
        ({"decode": {"autoscaling": {"mode": "On"}}}, "decode.autoscaling.mode", "'On'; it must"),
        ({"slo": {"ttftSeconds": "fast"}}, "slo.ttftSeconds", "'fast'; it must match pattern '^[0"),
        ({"slo": {"ttftSeconds": 10}}, "slo.ttftSeconds", "10; it must be a valid string"),
        (
            {"sloClasses": [{"name": "a"}, {"name": "b", "tbtMilliseconds": 0}]},
            "sloClasses[1].tbtMilliseconds",
            "0; it must be an integer from 1 to 1000000",
        ),
        ({"settings": {"a": 3}}, "settings.a", "3; it must be a valid string"),
        ({"model": {"name": "chat"}}, "model.uri", "missing"),
        ({"redis": {}}, "redis.secretRef", "missing"),
    ],
    ids=str,
)
def test_the_api_server_and_the_operator_reject_the_same(spec, field, wrong):
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(model_service(**spec), SCHEMAS["ModelService"])
    where = refused.value.json_path.removeprefix("$.spec.")
    if wrong == "missing":
        where = f"{where}.{field.rpartition('.')[2]}"
        assert f"'{field.rpartition('.')[2]}' is a required property" in refused.value.message
    assert where == field
    with pytest.raises(SpecError, match=re.escape(f"spec.{field} is {wrong}")):
        parse_service(model_service(**spec))
