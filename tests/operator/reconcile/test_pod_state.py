"""The state of pods, as the API server reports it."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_operator.observed import Ending, Pod
from millrace_operator.reconcile.pod_state import (
    all_available,
    finished,
    groups_of,
    pods_of,
    troubles_of,
)

CREATED, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
LATER_S = 1767225660.0


def pod(name: str = "chat-decode-0", **status: Any) -> dict[str, Any]:
    owner = {"kind": "StatefulSet", "name": "chat-decode", "uid": "s", "controller": True}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": CREATED,
            "labels": {"millrace.dev/template": "t", "millrace.dev/revision": "r"},
            "ownerReferences": [owner],
        },
        "status": {"phase": "Pending", **status},
    }


def is_ready(status: str) -> list[dict[str, Any]]:
    return [{"type": "Ready", "status": status, "lastTransitionTime": LATER}]


def waits(reason: str, message: str = "", **more: Any) -> list[dict[str, Any]]:
    return [{"state": {"waiting": {"reason": reason, "message": message}}, **more}]


def seen(obj: dict[str, Any]) -> Pod:
    (found,) = pods_of("chat-decode", [obj])
    return found


def test_a_pod_is_known_by_what_made_it():
    assert seen(pod(conditions=is_ready("True"))) == Pod(
        name="chat-decode-0",
        uid="uid-chat-decode-0",
        ordinal=0,
        template="t",
        revision="r",
        ready=True,
        unready_since=LATER,
    )


def test_others_with_the_same_labels_are_not_instances():
    copy, stranger = pod("chat-decode-0-debug"), pod("chat-decode-1")
    stranger["metadata"]["ownerReferences"] = []
    other = pod("chat-decode-2")
    other["metadata"]["ownerReferences"][0]["name"] = "chat-decode-canary"
    odd = pod("chat-decode-01")
    assert pods_of("chat-decode", [copy, stranger, other, odd]) == ()


def test_pods_come_by_ordinal():
    found = pods_of("chat-decode", [pod(f"chat-decode-{n}") for n in (10, 2, 1)])
    assert [one.ordinal for one in found] == [1, 2, 10]


def test_one_that_goes_is_not_ready_and_in_no_trouble():
    going = pod(conditions=is_ready("True"), containerStatuses=waits("CrashLoopBackOff"))
    going["metadata"]["deletionTimestamp"] = LATER
    assert (seen(going).terminating, seen(going).ready, seen(going).trouble) == (True, False, "")


def test_until_when_one_that_goes_should_have_gone():
    going = pod()
    going["metadata"]["deletionTimestamp"] = LATER
    going["metadata"]["deletionGracePeriodSeconds"] = 90
    going["spec"] = {"nodeName": "n1"}
    ending = Ending(name="chat-decode-0", node="n1", by_s=LATER_S, grace_s=90.0)
    assert seen(going).endings == (ending,)
    assert seen(pod()).endings == ()


def test_since_when_it_is_not_ready():
    assert seen(pod()).unready_since == CREATED
    assert seen(pod(conditions=is_ready("False"))).unready_since == LATER


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({}, ""),
        ({"containerStatuses": waits("ContainerCreating")}, ""),
        ({"containerStatuses": waits("PodInitializing")}, ""),
        (
            {"containerStatuses": waits("ImagePullBackOff", "no such image")},
            "ImagePullBackOff: no such image",
        ),
        (
            {"initContainerStatuses": waits("CrashLoopBackOff", "back-off 5m0s")},
            "CrashLoopBackOff: back-off 5m0s",
        ),
        (
            {
                "containerStatuses": waits(
                    "CrashLoopBackOff",
                    "back-off 5m0s",
                    lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                )
            },
            "CrashLoopBackOff: exit code 137 (OOMKilled)",
        ),
        (
            {
                "containerStatuses": waits(
                    "CrashLoopBackOff",
                    lastState={
                        "terminated": {
                            "exitCode": 1,
                            "reason": "Error",
                            "message": "{}\nmillrace: /models/chat: no such folder\n",
                        }
                    },
                )
            },
            "CrashLoopBackOff: exit code 1 (Error) millrace: /models/chat: no such folder",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            "Evicted: low on memory",
        ),
        ({"phase": "Failed"}, "Failed"),
    ],
)
def test_trouble_is_told_in_a_line(status: dict[str, Any], trouble: str):
    assert seen(pod(**status)).trouble == trouble


def test_the_trouble_of_a_deployment_is_its_first_pods():
    def of(name: str, component: str, **status: Any) -> dict[str, Any]:
        found = pod(name, **status)
        found["metadata"]["labels"] = {"app.kubernetes.io/component": component}
        return found

    pulls = {"containerStatuses": waits("ErrImagePull", "no such image")}
    going = of("chat-proxy-0", "proxy", **pulls)
    going["metadata"]["deletionTimestamp"] = LATER
    objects = [
        going,
        of("chat-proxy-1", "proxy", phase="Failed", reason="Evicted"),  # replaced by now
        of("chat-proxy-2", "proxy", conditions=is_ready("True"), **pulls),
        of("chat-proxy-3", "proxy", **pulls),
        of("chat-proxy-4", "proxy", containerStatuses=waits("CrashLoopBackOff")),
        of("chat-scheduler-0", "scheduler"),
    ]
    assert troubles_of(objects) == {"proxy": "chat-proxy-3: ErrImagePull: no such image"}


@pytest.mark.parametrize(
    ("counts", "whole"),
    [((2, 2, 2), True), ((3, 2, 2), False), ((2, 1, 2), False), ((2, 2, 1), False)],
)
def test_a_deployment_is_whole_when_all_its_pods_are_new_and_available(counts, whole):
    names = ("replicas", "updatedReplicas", "availableReplicas")
    status = dict(zip(names, counts, strict=True))
    assert all_available({"spec": {"replicas": 2}, "status": status}) == whole
    assert not all_available({"spec": {}})


def test_what_has_ended_uses_nothing():
    assert [finished(pod(phase=phase)) for phase in ("Running", "Failed", "Succeeded")] == [
        False,
        True,
        True,
    ]


# ---- groups: instances whose stages have pods of their own


def of_group(name: str, maker: str, created: str = CREATED, **status: Any) -> dict[str, Any]:
    found = pod(name, **status)
    found["metadata"]["creationTimestamp"] = created
    found["metadata"]["ownerReferences"][0]["name"] = maker
    return found


def first(number: int = 0, **more: Any) -> dict[str, Any]:
    return of_group(f"chat-decode-{number}-0", f"chat-decode-{number}", **more)


def later(stage: int = 1, number: int = 0, **more: Any) -> dict[str, Any]:
    maker = f"chat-decode-{number}-0"
    return of_group(f"{maker}-{stage}", maker, **more)


def test_a_group_is_known_by_the_pod_of_its_first_stage():
    objects = [first(10, conditions=is_ready("True")), later(2, 10), later(1, 10), first(2)]
    found = groups_of("chat-decode", objects)
    assert [(one.name, one.ordinal, one.ready) for one in found] == [
        ("chat-decode-2-0", 2, False),
        ("chat-decode-10-0", 10, True),
    ]
    assert not any(one.loses_stage for one in found)


def test_pods_of_others_are_of_no_group():
    strangers = [
        pod("chat-decode-0"),  # of a pool whose stages share a pod
        of_group("chat-decode-0-0", "chat-decode"),
        of_group("chat-decode-0-0", "another"),
        of_group("chat-decode-01-0", "chat-decode-01"),
        later(),
    ]
    for stranger in strangers:
        assert groups_of("chat-decode", [stranger]) == ()


def test_what_keeps_a_later_stage_from_starting_is_the_instances_trouble():
    waiting = later(2, containerStatuses=waits("ErrImagePull", "no such image"))
    (found,) = groups_of("chat-decode", [first(), later(1), waiting])
    assert found.trouble == "chat-decode-0-0-2: ErrImagePull: no such image"
    own = first(containerStatuses=waits("CrashLoopBackOff"))
    (found,) = groups_of("chat-decode", [own, waiting])
    assert found.trouble.startswith("CrashLoopBackOff")


@pytest.mark.parametrize(("created", "loses"), [(LATER, True), (CREATED, False)])
def test_an_instance_loses_a_stage_with_a_pod_of_its_own_not_its_predecessors(
    created: str, loses: bool
):
    leaving = later(created=created)
    leaving["metadata"]["deletionTimestamp"] = LATER
    (found,) = groups_of("chat-decode", [first(created=LATER), leaving])
    assert found.loses_stage == loses
    # On a lost node the predecessor's pod keeps the name from its successor, too.
    assert found.endings == (Ending(name=leaving["metadata"]["name"], node="", by_s=LATER_S),)
