"""A ModelService's children and status."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from millrace_operator.observed import ObservedService
from millrace_operator.reconcile.actions import Apply, Delete, Report, SetStatus
from millrace_operator.reconcile.conditions import by_type
from millrace_operator.reconcile.service import reconcile_service
from millrace_operator.spec import parse_service
from support.custom_resources import DEFAULTS, SCHEMAS, defaulted, model_service


class Scene:
    """A service with existing, healthy children."""

    def __init__(self, **spec: Any) -> None:
        self.service = model_service(**spec)
        self.live: dict[tuple[str, str], dict[str, Any]] = {}
        self.troubles: dict[str, str] = {}
        self.carry_out()
        for (kind, name), child in self.live.items():
            if kind == "Deployment":
                child["status"] = {"availableReplicas": 1}
            elif kind in SCHEMAS:
                child["metadata"]["uid"] = f"uid-of-{name}"
                self.say(kind, Available="True", Progressing="False", Degraded="False")
        self.carry_out()

    def say(self, kind: str, *, message: str = "", ready: int = 1, **conditions: str) -> None:
        """Returns a pool's status."""
        child = next(c for (k, _), c in self.live.items() if k == kind)
        known = by_type(child.get("status", {}))
        for name, status in conditions.items():
            known[name] = {"type": name, "status": status, "reason": "Test", "message": message}
        child["status"] = {
            "readyReplicas": ready,
            "replicas": ready,
            "conditions": list(known.values()),
        }

    def look(self) -> list[Any]:
        observed = ObservedService(live=self.live, troubles=self.troubles, now_s=10_000.0)
        return reconcile_service(parse_service(self.service), observed, DEFAULTS)

    def carry_out(self) -> list[Any]:
        actions = self.look()
        for action in actions:
            match action:
                case Apply(manifest=manifest):
                    key = manifest["kind"], manifest["metadata"]["name"]
                    status = self.live.get(key, {}).get("status")
                    made = defaulted(SCHEMAS.get(manifest["kind"], {}), dict(manifest))
                    self.live[key] = made | ({"status": status} if status else {})
                case SetStatus(status=status):
                    self.service["status"] = dict(status)
                    jsonschema.validate(self.service, SCHEMAS["ModelService"])
                case Delete(kind=kind, name=name):
                    del self.live[kind, name]
        return actions

    @property
    def phase(self) -> str:
        self.carry_out()
        return self.service["status"]["phase"]

    def message(self, kind: str) -> str:
        return by_type(self.service["status"])[kind]["message"]


def applied(actions: list[Any]) -> list[str]:
    return [a.manifest["metadata"]["name"] for a in actions if isinstance(a, Apply)]


def test_a_calm_service_is_left_alone():
    scene = Scene(kvp={})
    assert scene.look() == []
    assert scene.service["status"]["endpoint"] == "http://chat-proxy.llm.svc:80"
    assert scene.service["status"]["prefillReady"] == "1/1"


def test_only_what_changes_is_applied():
    scene = Scene()
    scene.service["spec"]["slo"]["ttftSeconds"] = "3"
    assert applied(scene.carry_out()) == ["chat-config", "chat-proxy"]
    scene.service["spec"]["decode"]["autoscaling"]["maxReplicas"] = 3
    assert applied(scene.carry_out()) == ["chat-decode"]
    assert scene.look() == []


def test_a_pools_replicas_are_not_looked_at_and_a_gateways_are():
    scene = Scene()
    scene.live["DecodePool", "chat-decode"]["spec"]["replicas"] = 7
    actions = scene.carry_out()
    assert [type(a) for a in actions] == [SetStatus]
    assert scene.service["status"]["decodeReady"] == "1/7"
    scene.live["Deployment", "chat-proxy"]["spec"]["replicas"] = 7
    assert applied(scene.look()) == ["chat-proxy"]


def test_phases():
    scene = Scene()
    assert scene.phase == "Ready"
    scene.say("DecodePool", Progressing="True", message="1 of 2 instances take work")
    assert scene.phase == "Scaling"
    assert scene.message("Progressing") == "decode: 1 of 2 instances take work"
    scene.say("DecodePool", Available="False", message="0 of 2 instances take work")
    assert scene.phase == "Pending"
    assert scene.message("Available") == "decode: 0 of 2 instances take work"
    scene.say("DecodePool", Degraded="True", message="no GPU")
    assert scene.phase == "Degraded"
    scene.service["spec"]["paused"] = True
    assert scene.phase == "Paused"


def test_a_mixed_pool_serves_alone():
    scene = Scene(prefill=None, decode={"role": "mixed"})
    assert not [name for _, name in scene.live if name.startswith("chat-prefill")]
    assert scene.phase == "Ready" and "prefillReady" not in scene.service["status"]
    scene.say("DecodePool", Available="False", message="0 of 1 instances take work")
    assert scene.phase == "Pending"
    scene.say("DecodePool", Available="True")
    scene.live["DecodePool", "chat-decode"]["spec"]["replicas"] = 0
    assert scene.phase == "Idle"


def test_asleep():
    scene = Scene()
    for kind, name in (("PrefillGroup", "chat-prefill"), ("DecodePool", "chat-decode")):
        scene.live[kind, name]["spec"]["replicas"] = 0
    assert scene.phase == "Idle"
    assert by_type(scene.service["status"])["Available"]["status"] == "True"


@pytest.mark.parametrize("name", ["chat-scheduler", "chat-proxy"])
def test_nothing_is_available_without(name):
    scene = Scene()
    scene.live["Deployment", name]["status"] = {}
    assert scene.phase == "Pending"


def test_a_part_says_why_it_is_not_ready():
    scene = Scene()
    scene.live["Deployment", "chat-proxy"]["status"] = {}
    scene.troubles = {"proxy": "chat-proxy-1: ImagePullBackOff: no such image"}
    assert scene.phase == "Degraded"
    why = "chat-proxy-1: ImagePullBackOff: no such image"
    assert scene.message("Available") == f"the gateway is not ready: {why}"
    assert scene.message("Degraded") == f"gateway: {why}"
    scene.troubles = {}
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: cpu"}
    scene.live["Deployment", "chat-proxy"]["status"] = {"conditions": [refused]}
    assert scene.phase == "Degraded"
    assert scene.message("Available") == "the gateway is not ready: exceeded quota: cpu"
    refused["status"] = "False"
    assert scene.phase == "Pending"
    assert scene.message("Available") == "the gateway is not ready"


def test_a_bad_new_pod_beside_serving_pods_shows():
    scene = Scene()
    scene.troubles = {"scheduler": "chat-scheduler-1: CrashLoopBackOff: exit code 1"}
    assert scene.phase == "Degraded"
    assert by_type(scene.service["status"])["Available"]["status"] == "True"


def test_paused_changes_nothing():
    scene = Scene()
    scene.service["spec"]["paused"] = True
    scene.service["spec"]["slo"]["ttftSeconds"] = "3"
    assert applied(scene.carry_out()) == []
    assert scene.look() == []


def test_a_wrong_spec_is_told_once():
    scene = Scene()
    scene.service["spec"]["settings"] = {"engine.colour": "red"}
    actions = scene.carry_out()
    assert [a.reason for a in actions if isinstance(a, Report)] == ["InvalidSpec"]
    assert applied(actions) == []
    assert scene.service["status"]["phase"] == "Degraded"
    assert scene.look() == []


def test_a_dropped_pool_is_deleted_once_it_is_empty():
    scene = Scene(kvp={})
    del scene.service["spec"]["kvp"]
    scene.say("KVPWorkerPool", ready=1)
    assert not any(isinstance(a, Delete) for a in scene.carry_out())
    scene.say("KVPWorkerPool", ready=0)
    (delete,) = [a for a in scene.carry_out() if isinstance(a, Delete)]
    assert (delete.kind, delete.name, delete.uid) == (
        "KVPWorkerPool",
        "chat-kvp",
        "uid-of-chat-kvp",
    )
    scene.carry_out()
    assert scene.look() == []


def test_what_goes_is_left_to_the_garbage_collector():
    scene = Scene()
    scene.service["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    scene.live.clear()
    assert scene.look() == []
