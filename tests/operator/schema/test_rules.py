"""The rules of the CRDs, evaluated: what an API server refuses, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_operator.schema.crds import LONGEST_POOL_NAME, SHORTER_WITH_STAGE_PODS
from support.cel_rules import refusals
from support.chart import PROFILES, profile
from support.custom_resources import SCHEMAS, defaulted, model_service, pool

MODEL = {"name": "chat", "uri": "/models/chat"}
BOTH_SLEEP = {"autoscaling": {"minReplicas": 0, "scaleToZero": {"enabled": True}}}


def refused(**spec: Any) -> list[str]:
    return refusals(SCHEMAS["ModelService"], model_service(**spec))


@pytest.mark.parametrize("name", PROFILES)
def test_an_api_server_takes_the_profiles_of_the_chart(name: str) -> None:
    (service,) = [o for o in profile(name) if o["kind"] == "ModelService"]
    schema = SCHEMAS["ModelService"]
    assert refusals(schema, defaulted(schema, service)) == []


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"prefill": BOTH_SLEEP, "decode": BOTH_SLEEP},
        {"prefill": {"gpus": 0, "stages": 2}},
        {"prefill": {"stages": 2, "tensorParallel": 4, "gpus": 8}},
        {"decode": {"tensorParallel": 4}},
        {"prefill": {"stages": 2, "stagePods": "Own"}, "decode": {"stages": 4, "stagePods": "Own"}},
        {"prefill": {"stages": 3, "stagePods": "Own", "gpus": 6}},
        {"prefill": {"stages": 3, "stagePods": "Own", "gpus": 0}},
        {"gateway": {"models": [{"service": "b"}], "canary": {"service": "b", "percent": 5}}},
        {"kvp": {}},
    ],
    ids=str,
)
def test_what_is_right_is_taken(spec: dict[str, Any]) -> None:
    assert refused(**spec) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"prefill": {"autoscaling": {"minReplicas": 5, "maxReplicas": 2}}},
            ".spec.prefill.autoscaling: minReplicas must be <= maxReplicas",
        ),
        (
            {"decode": {"autoscaling": {"minReplicas": 0}}},
            ".spec.decode.autoscaling: minReplicas 0 needs scaleToZero.enabled",
        ),
        ({"decode": BOTH_SLEEP}, ".spec: prefill and decode must both scale to zero, or neither"),
        (
            {
                "prefill": BOTH_SLEEP,
                "decode": BOTH_SLEEP,
                "gateway": {"parking": {"timeoutSeconds": 0}},
            },
            ".spec: scaleToZero needs gateway.parking.timeoutSeconds above 0",
        ),
        (
            {"decode": {"stages": 2, "gpus": 1}},
            ".spec.decode: gpus must be 0 or at least tensorParallel times stages: each rank of",
        ),
        (
            {"prefill": {"tensorParallel": 8, "gpus": 4}},
            ".spec.prefill: gpus must be 0 or at least tensorParallel times stages: each rank of",
        ),
        (
            {"prefill": {"stagePods": "Own"}},
            ".spec.prefill: stagePods is Own and stages is 1: an instance of one stage has one pod",
        ),
        (
            {"decode": {"stages": 3, "stagePods": "Own", "gpus": 4}},
            ".spec.decode: gpus must be divisible by stages where stagePods is Own",
        ),
        (
            {"decode": {"autoscaling": {"metrics": [{"name": "utilization", "target": "0.5"}]}}},
            ".spec.decode: backlogSeconds, utilization and ttftSloRatio are signals of role mixed",
        ),
        (
            {"gateway": {"canary": {"service": "b", "percent": 5}}},
            ".spec: gateway.canary.service is none of gateway.models",
        ),
        (
            {"gateway": {"files": {"claimName": "a", "url": "s3://b/c"}}},
            ".spec.gateway.files: claimName and url exclude each other",
        ),
        (
            {"kvp": {"autoscaling": {"maxReplicas": 8}}},
            ".spec.kvp: maxWorkersPerRequest must be <= autoscaling.maxReplicas",
        ),
        (
            {"kvp": {"tokensPerWorker": 1024}, "model": {**MODEL, "maxContextTokens": 10**6}},
            ".spec: kvp cannot hold maxContextTokens: raise tokensPerWorker or "
            "maxWorkersPerRequest",
        ),
        (
            {"decode": {"role": "mixed"}},
            ".spec: decode.role decode needs prefill; role mixed computes prompts and allows no "
            "prefill",
        ),
        ({"model": {"name": "a", "uri": "qwen"}}, ".spec.model: "),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(spec: dict[str, Any], said: str) -> None:
    found = refused(**spec)
    assert len(found) == 1
    assert found[0].startswith(said)


@pytest.mark.parametrize(
    ("name", "stage_pods", "said"),
    [
        ("a" * 44, "Shared", []),
        ("a" * 37, "Own", []),
        (
            "a" * 38,
            "Own",
            [": the name has at most 37 characters where spec.prefill.stagePods is Own"],
        ),
    ],
)
def test_names_are_short_enough_for_the_labels_of_pods(
    name: str, stage_pods: str, said: list[str]
) -> None:
    spec = {"prefill": {"stages": 2, "stagePods": stage_pods}}
    found = model_service(name, **spec)
    assert refusals(SCHEMAS["ModelService"], found) == said


def test_the_longest_name_fits_the_labels_of_all_its_pods() -> None:
    """A StatefulSet's pods carry its name, a dash and a hash of ten characters in a label."""
    pool_name = "a" * (LONGEST_POOL_NAME - SHORTER_WITH_STAGE_PODS)
    found = pool("DecodePool", pool_name, stages=2, stagePods="Own")
    assert refusals(SCHEMAS["DecodePool"], found) == []
    assert len(f"{pool_name}-1000-0-{'h' * 10}") <= 63
    longer = pool("DecodePool", pool_name + "a", stages=2, stagePods="Own")
    assert refusals(SCHEMAS["DecodePool"], longer) == [
        ": the name has at most 45 characters where spec.stagePods is Own"
    ]
