"""Room in ResourceQuotas, by Kubernetes' documentation."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from millrace_operator.run.quota import devices, room

GPU = "nvidia.com/gpu"


def template(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": list(containers), **spec}}


def container(**limits: str) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": limits}}


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


TWO_GPUS = template(container(**{GPU: "2", "cpu": "4"}))


def test_devices_are_resources_with_a_domain():
    both = {"resources": {"limits": {GPU: "2"}, "requests": {GPU: "2", "cpu": "1"}}}
    links = container(**{"rdma/hca": "1", "hugepages-2Mi": "1Gi", "example.kubernetes.io/x": "1"})
    pod = {"containers": [both, links], "initContainers": [container(**{GPU: "3"})]}
    assert devices(pod) == {GPU: Decimal(3), "rdma/hca": Decimal(1)}
    assert devices({"containers": [{"name": "c"}]}) == {}


@pytest.mark.parametrize(
    ("hard", "used", "existing", "expected"),
    [
        ({f"requests.{GPU}": "10"}, {f"requests.{GPU}": "4"}, 2, 5),
        ({f"requests.{GPU}": "10"}, {f"requests.{GPU}": "5"}, 2, 4),
        ({f"requests.{GPU}": "3"}, {f"requests.{GPU}": "4"}, 2, 2),  # lowered since
        ({f"requests.{GPU}": "10"}, {}, 0, 5),  # not counted yet
        ({"pods": "7"}, {"pods": "4"}, 2, 5),
        ({"count/pods": "1k"}, {"count/pods": "999"}, 1, 2),
        ({f"requests.{GPU}": "100", "pods": "3"}, {"pods": "3"}, 2, 2),
        ({"requests.cpu": "1", GPU: "1"}, {}, 2, None),  # no limit of devices
    ],
)
def test_the_tightest_quota_counts(
    hard: dict[str, str], used: dict[str, str], existing: int, expected: int | None
):
    assert room([quota(hard, used)], TWO_GPUS, existing) == expected


def test_several_quotas_hold_together():
    wide, tight = quota({f"requests.{GPU}": "100"}), quota({f"requests.{GPU}": "6"})
    assert room([wide, tight], TWO_GPUS, 0) == 3
    assert room([], TWO_GPUS, 3) is None
    fresh = {"spec": {"hard": {f"requests.{GPU}": "4"}}}
    assert room([fresh], TWO_GPUS, 0) == 2


def test_an_instance_of_several_pods_needs_room_for_all() -> None:
    hard = quota({f"requests.{GPU}": "20"}, {f"requests.{GPU}": "6"})
    assert room([hard], TWO_GPUS, 1, pods=3) == 1 + 2
    assert room([quota({"pods": "7"})], TWO_GPUS, 0, pods=3) == 2


def expression(scope: str, operator: str, *values: str) -> dict[str, Any]:
    one = {"scopeName": scope, "operator": operator, "values": list(values)}
    return {"scopeSelector": {"matchExpressions": [one]}}


@pytest.mark.parametrize(
    ("scope", "counts"),
    [
        ({}, True),
        ({"scopes": ["NotTerminating"]}, True),
        ({"scopes": ["Terminating"]}, False),
        ({"scopes": ["NotBestEffort"]}, True),
        ({"scopes": ["BestEffort"]}, False),
        ({"scopes": ["NotTerminating", "BestEffort"]}, False),
        ({"scopes": ["PriorityClass"]}, True),
        (expression("PriorityClass", "In", "high"), True),
        (expression("PriorityClass", "In", "low"), False),
        (expression("PriorityClass", "NotIn", "high"), False),
        (expression("PriorityClass", "Exists"), True),
        (expression("PriorityClass", "DoesNotExist"), False),
    ],
)
def test_scopes_choose_the_pods_that_a_quota_counts(scope: dict[str, Any], counts: bool):
    pods = template(container(**{GPU: "2"}), priorityClassName="high")
    limited = room([quota({f"requests.{GPU}": "2"}, **scope)], pods, 0)
    assert limited == (1 if counts else None)
