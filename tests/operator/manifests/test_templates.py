"""Merging of a user's pod template over the operator's."""

from __future__ import annotations

import pytest

from millrace_operator.manifests import instances
from millrace_operator.manifests.pods import Context
from millrace_operator.manifests.templates import merged
from millrace_operator.spec import SpecError, parse_pool, parse_service
from support.custom_resources import DEFAULTS, model_service, pool


def made(**template):
    context = Context.of(parse_service(model_service()), DEFAULTS)
    return instances.instance(parse_pool(pool(template=template)), context)


def test_rdma_needs_a_template():
    container = {
        "name": "millrace",
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "resources": {"limits": {"rdma/hca": "1"}},
    }
    spec = made(spec={"containers": [container]})["spec"]
    (main,) = spec["containers"]
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/hca": "1"}
    assert main["args"][0] == "decode"


def test_lists_are_known_by_their_keys():
    container = {
        "name": "millrace",
        "image": "mine:1",
        "env": [{"name": "HOME", "value": "/x"}, {"name": "NEW", "value": "y"}],
        "volumeMounts": [{"name": "huge", "mountPath": "/dev/hugepages"}],
    }
    sidecar = {"name": "sidecar", "image": "other:1"}
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "huge", "emptyDir": {"medium": "HugePages"}},
    ]
    spec = made(spec={"containers": [container, sidecar], "volumes": volumes})["spec"]
    main, other = spec["containers"]
    assert (main["image"], other) == ("mine:1", sidecar)
    env = {e["name"]: e for e in main["env"]}
    assert env["HOME"] == {"name": "HOME", "value": "/x"}
    assert {"NEW", "POD_IP"} <= env.keys()
    assert {v["name"]: v for v in spec["volumes"]}["shm"] == volumes[0]
    assert {"config", "huge"} <= {v["name"] for v in spec["volumes"]}
    assert {"/dev/hugepages", "/dev/shm"} <= {m["mountPath"] for m in main["volumeMounts"]}


def test_labels_that_selectors_read_stay():
    metadata = made(
        metadata={
            "labels": {"team": "a", "millrace.dev/pool": "stolen"},
            "annotations": {"note": "b"},
        }
    )["metadata"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["millrace.dev/pool"] == "chat-decode"
    assert {"note", "millrace.dev/config"} <= metadata["annotations"].keys()


def test_none_takes_away_and_other_lists_are_replaced():
    spec = made(
        spec={
            "topologySpreadConstraints": None,
            "tolerations": [{"key": "gpu"}],
            "terminationGracePeriodSeconds": 5,
        }
    )["spec"]
    assert "topologySpreadConstraints" not in spec
    assert spec["tolerations"] == [{"key": "gpu"}]
    assert spec["terminationGracePeriodSeconds"] == 5


def test_neither_side_is_changed():
    base, over = {"a": {"b": 1}, "env": [{"name": "x"}]}, {"a": {"c": 2}, "env": [{"name": "y"}]}
    assert merged(base, over, "t") == {"a": {"b": 1, "c": 2}, "env": [{"name": "x"}, {"name": "y"}]}
    assert base == {"a": {"b": 1}, "env": [{"name": "x"}]}


@pytest.mark.parametrize(
    "over, message",
    [
        ({"spec": {"securityContext": 1}}, r"t.spec.securityContext is 1; it must be a mapping"),
        ({"spec": {"volumes": [1]}}, r"t.spec.volumes\[0\] is 1; it must be a mapping"),
        ({"spec": {"volumes": [{}]}}, r"t.spec.volumes\[0\] has no name"),
    ],
)
def test_errors_name_the_place(over, message):
    base = {"spec": {"securityContext": {}, "volumes": []}}
    with pytest.raises(SpecError, match=message):
        merged(base, over, "t")
