"""One pool, one pass at a time: what is done, in what order, and what the status says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from millrace.core.autoscale import PoolMetrics, Recommendation
from millrace_operator.actions import (
    Apply,
    Cordon,
    Delete,
    Evict,
    Report,
    SetReplicas,
    SetStatus,
)
from millrace_operator.conditions import by_type, timestamp
from millrace_operator.observed import Instance, ObservedPool, Peer, Pod
from millrace_operator.reconcile import reconcile_pool
from support.custom_resources import DEFAULTS, SCHEMAS, model_service, pool

NOW_S = 10_000.0
NAME = "chat-decode"
CALM = PoolMetrics(sampled_s=NOW_S, ready=3, active_requests=4, kv_utilisation=0.512)


def advice(replicas: int, **more: Any) -> Recommendation:
    return Recommendation(replicas=replicas, reason="KV in use", **more)


class Scene:
    """A pool of `size` ready instances that hold nothing, as an earlier pass left it."""

    def __init__(self, size: int = 3, **spec: Any) -> None:
        self.pool = pool(replicas=size, **spec)
        self.service = model_service()
        self.observed = ObservedPool(
            service=self.service, metrics=CALM, recommendation=advice(size), now_s=NOW_S
        )
        for action in self.look():
            if isinstance(action, Apply):
                manifest = dict(action.manifest)
                self.observed.live[manifest["kind"], NAME] = manifest  # type: ignore[index]
            if isinstance(action, SetStatus):
                self.pool["status"] = dict(action.status)
        labels = self.template["metadata"]["labels"]
        pods = tuple(
            Pod(
                name=f"{NAME}-{n}",
                uid=f"u{n}",
                ordinal=n,
                template=labels["millrace.dev/template"],
                revision=labels["millrace.dev/revision"],
                ready=True,
            )
            for n in range(size)
        )
        self.see(pods=pods, instances={p.name: held(p, 0) for p in pods})
        self.carry_out()

    @property
    def template(self) -> dict[str, Any]:
        return self.observed.live["StatefulSet", NAME]["spec"]["template"]

    def see(self, **what: Any) -> None:
        self.observed = replace(self.observed, **what)

    def look(self) -> list[Any]:
        return reconcile_pool(self.pool, self.observed, DEFAULTS)

    def carry_out(self) -> list[Any]:
        """What a pass does, with the status and the cordons carried out."""
        actions = self.look()
        for action in actions:
            if isinstance(action, SetStatus):
                self.pool["status"] = dict(action.status)
                jsonschema.validate(self.pool, SCHEMAS[self.pool["kind"]])
            if isinstance(action, Cordon):
                known = self.observed.instances[action.instance_id]
                self.knows(action.instance_id, replace(known, cordoned=action.cordoned))
        return actions

    def knows(self, name: str, instance: Instance) -> None:
        self.see(instances={**(self.observed.instances or {}), name: instance})

    def pod(self, ordinal: int, **what: Any) -> None:
        pods = [replace(p, **what) if p.ordinal == ordinal else p for p in self.observed.pods]
        self.see(pods=tuple(pods))

    def condition(self, kind: str) -> tuple[str, str]:
        found = by_type(self.pool["status"])[kind]
        return found["status"], found["reason"]


def held(pod: Pod, requests: int, *, cordoned: bool = False) -> Instance:
    return Instance(id=pod.name, cordoned=cordoned, held_requests=requests)


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def size(actions: list[Any]) -> int | None:
    """That a StatefulSet is given."""
    found = [a.manifest for a in actions if isinstance(a, Apply)]
    return next((m["spec"]["replicas"] for m in found if m["kind"] == "StatefulSet"), None)


def reasons(actions: list[Any]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Report)]


def test_a_calm_pool_is_left_alone():
    scene = Scene()
    assert scene.look() == []
    scene.see(now_s=NOW_S + 3600)
    assert scene.look() == []


def test_the_first_pass_makes_everything_and_the_first_size():
    first = pool()
    first["metadata"]["annotations"] = {"millrace.dev/initial-replicas": "4"}
    seen = ObservedPool(service=model_service(), recommendation=advice(9), now_s=NOW_S)
    actions = reconcile_pool(first, seen, DEFAULTS)
    assert kinds(actions) == ["SetReplicas", *["Apply"] * 3, "Report", "SetStatus"]
    assert actions[0] == SetReplicas(replicas=4)
    assert size(actions) == 4


def test_a_conditions_time_is_that_of_its_status():
    scene = Scene()
    scene.see(now_s=NOW_S + 60)
    scene.pod(0, ready=False)
    scene.carry_out()
    found = by_type(scene.pool["status"])
    assert found["Available"]["lastTransitionTime"] == timestamp(NOW_S)
    assert found["Available"]["message"] == "2 of 3 instances take work"
    assert found["Progressing"]["lastTransitionTime"] == timestamp(NOW_S + 60)


# ---- scaling


def test_internal_follows_the_recommendation():
    scene = Scene()
    scene.see(recommendation=advice(5))
    actions = scene.carry_out()
    assert actions[0] == SetReplicas(replicas=5)
    assert size(actions) == 5
    assert reasons(actions) == ["Scaled"]
    assert scene.pool["status"]["lastScaleReason"] == "KV in use"
    assert scene.pool["status"]["lastScaleTime"] == timestamp(NOW_S)


@pytest.mark.parametrize("mode", ["External", "Off"])
def test_otherwise_it_only_recommends(mode):
    scene = Scene(autoscaling={"mode": mode})
    scene.see(recommendation=advice(5))
    assert kinds(scene.carry_out()) == ["SetStatus"]
    assert scene.pool["status"]["desiredReplicas"] == 5
    assert scene.condition("ScalingActive") == ("False", f"Mode{mode}")


def test_steps_that_nobody_takes_do_not_show():
    """Followed, a recommendation would wait for the next step; here it would come and go."""
    scene = Scene(autoscaling={"mode": "External"})
    scene.see(recommendation=advice(5, wished=9))
    scene.carry_out()
    assert scene.pool["status"]["desiredReplicas"] == 5
    scene.see(recommendation=advice(5, wished=20, limited=True, limited_by="step"))
    scene.carry_out()
    assert scene.pool["status"]["desiredReplicas"] == 16  # autoscaling.maxReplicas
    assert scene.condition("ScalingLimited") == ("False", "WithinLimits")


def test_limits_show():
    scene = Scene()
    scene.see(recommendation=advice(3, limited=True, limited_by="quota"))
    assert reasons(scene.carry_out()) == ["QuotaLimited"]
    assert scene.condition("ScalingLimited") == ("True", "Quota")
    assert scene.look() == []


def test_signals_alone_are_written_every_half_minute():
    scene = Scene()
    assert scene.pool["status"]["metrics"] == [
        {"name": "kvUtilization", "value": "0.51", "target": "0.8"}
    ]
    scene.see(metrics=replace(CALM, kv_utilisation=0.6), now_s=NOW_S + 29)
    assert scene.look() == []
    scene.see(now_s=NOW_S + 30)
    assert kinds(scene.carry_out()) == ["SetStatus"]
    assert scene.pool["status"]["metrics"][0]["value"] == "0.6"


def test_no_metrics():
    scene = Scene()
    scene.see(metrics_error="the scheduler does not answer")
    scene.carry_out()
    assert scene.condition("MetricsAvailable") == ("False", "NoFreshSample")
    assert scene.condition("ScalingActive") == ("False", "MetricsUnavailable")


# ---- drains


def draining(requests: int = 2, **spec: Any) -> Scene:
    """One of three is one too many, and holds requests."""
    scene = Scene(**spec)
    scene.knows(f"{NAME}-2", held(scene.observed.pods[2], requests))
    scene.pool["spec"]["replicas"] = 2
    scene.see(recommendation=advice(2))
    return scene


def test_scale_in_cordons_first():
    scene = draining()
    actions = scene.carry_out()
    assert kinds(actions) == ["Report", "SetStatus", "Cordon"]
    assert actions[-1] == Cordon(instance_id=f"{NAME}-2", cordoned=True)
    assert scene.pool["status"]["draining"] == [
        {"pod": f"{NAME}-2", "uid": "u2", "since": timestamp(NOW_S), "reason": "ScaleIn"}
    ]
    assert scene.condition("Draining") == ("True", "InstancesDrain")
    assert scene.look() == []
    scene.knows(f"{NAME}-2", held(scene.observed.pods[2], 0, cordoned=True))
    actions = scene.carry_out()
    assert size(actions) == 2
    assert reasons(actions) == ["Drained"]


def test_an_instance_without_work_goes_only_once_cordoned():
    scene = draining(requests=0)
    assert size(scene.carry_out()) is None
    assert size(scene.carry_out()) == 2


def test_one_that_is_wanted_again_takes_work_again():
    scene = draining()
    scene.carry_out()
    scene.pool["spec"]["replicas"] = 3
    scene.see(recommendation=advice(3))
    actions = scene.carry_out()
    assert kinds(actions) == ["Cordon", "SetStatus"]
    assert actions[0] == Cordon(instance_id=f"{NAME}-2", cordoned=False)
    assert "draining" not in scene.pool["status"]


def test_the_highest_ordinal_that_still_works_keeps_those_below():
    scene = draining()
    scene.pool["spec"]["replicas"] = 1
    scene.see(recommendation=advice(1))
    scene.carry_out()
    assert size(scene.look()) is None  # of 1 and 2, both cordoned, 1 is empty and 2 is not
    scene.knows(f"{NAME}-2", held(scene.observed.pods[2], 0, cordoned=True))
    assert size(scene.look()) == 1


@pytest.mark.parametrize(
    "on_timeout, evicted", [("Migrate", [False]), ("Abort", [True]), ("Wait", [])]
)
def test_when_its_time_is_over(on_timeout, evicted):
    scene = draining(drain={"timeoutSeconds": 100, "onTimeout": on_timeout})
    scene.carry_out()
    scene.see(now_s=NOW_S + 99)
    assert scene.look() == []
    scene.see(now_s=NOW_S + 100)
    actions = scene.carry_out()
    assert [a.abort for a in actions if isinstance(a, Evict)] == evicted
    assert size(actions) is None
    assert reasons(actions) == ["DrainTimedOut"]
    assert reasons(scene.carry_out()) == []
    scene.see(now_s=NOW_S + 160)
    assert size(scene.look()) == (None if on_timeout == "Wait" else 2)


def test_a_silent_scheduler_keeps_everybody_until_the_timeout():
    scene = draining(requests=0, drain={"timeoutSeconds": 100})
    scene.see(instances=None)
    assert kinds(scene.carry_out()) == ["Report", "SetStatus"]
    scene.see(now_s=NOW_S + 99)
    assert scene.look() == []
    scene.see(now_s=NOW_S + 100)
    assert size(scene.look()) == 2


def test_a_ready_instance_that_is_not_registered_is_about_to_be():
    scene = draining(requests=0)
    known = dict(scene.observed.instances)
    del known[f"{NAME}-2"]
    scene.see(instances=known)
    scene.carry_out()
    assert size(scene.look()) is None
    scene.pod(2, ready=False)
    assert size(scene.look()) == 2


def test_another_pod_of_that_name_drains_anew():
    scene = draining()
    scene.carry_out()
    scene.pod(2, uid="another")
    scene.see(now_s=NOW_S + 599)
    scene.carry_out()
    assert scene.pool["status"]["draining"][0]["since"] == timestamp(NOW_S + 599)


def test_zero():
    scene = draining(requests=0)
    scene.pool["spec"]["replicas"] = 0
    scene.see(recommendation=advice(0))
    scene.carry_out()
    assert size(scene.carry_out()) == 0
    scene.see(pods=())
    assert scene.condition("Available") == ("True", "ScaledToZero")


# ---- rollouts


def old(scene: Scene, *, revision: str = "") -> None:
    """All pods are of an earlier template."""
    for pod in scene.observed.pods:
        scene.pod(pod.ordinal, template="old", revision=revision or pod.revision)


def new_pod(scene: Scene, ordinal: int, *, ready: bool = True) -> None:
    labels = scene.template["metadata"]["labels"]
    made = Pod(
        name=f"{NAME}-{ordinal}",
        uid=f"new{ordinal}",
        ordinal=ordinal,
        template=labels["millrace.dev/template"],
        revision=labels["millrace.dev/revision"],
        ready=ready,
    )
    others = [p for p in scene.observed.pods if p.ordinal != ordinal]
    scene.see(pods=tuple(sorted([*others, made], key=lambda p: p.ordinal)))
    scene.knows(made.name, held(made, 0))


def test_a_rollout_surges_replaces_one_by_one_and_ends():
    scene = Scene(2)
    old(scene)
    actions = scene.carry_out()
    assert size(actions) == 3
    assert reasons(actions) == ["RolloutStarted"]
    scene.observed.live["StatefulSet", NAME]["spec"]["replicas"] = 3
    new_pod(scene, 2, ready=False)
    assert not any(isinstance(a, Cordon) for a in scene.carry_out())
    new_pod(scene, 2)
    for ordinal in (1, 0):
        cordons = [a for a in scene.carry_out() if isinstance(a, Cordon)]
        assert cordons == [Cordon(instance_id=f"{NAME}-{ordinal}", cordoned=True)]
        (delete,) = [a for a in scene.carry_out() if isinstance(a, Delete)]
        assert delete == Delete(
            api_version="v1", kind="Pod", name=f"{NAME}-{ordinal}", uid=f"u{ordinal}"
        )
        new_pod(scene, ordinal, ready=False)
        scene.carry_out()
        assert scene.condition("Progressing") == ("True", "RollingOut")
        new_pod(scene, ordinal)
    actions = scene.carry_out()
    assert reasons(actions) == ["RolloutFinished", "Draining"]
    assert size(scene.carry_out()) == 2


def test_without_surge_an_old_one_goes_first():
    scene = Scene(2, rollout={"maxSurge": 0})
    old(scene)
    actions = scene.carry_out()
    assert size(actions) is None
    assert [a.instance_id for a in actions if isinstance(a, Cordon)] == [f"{NAME}-1"]


def test_an_old_one_that_never_started_is_replaced_at_once():
    scene = Scene(2)
    old(scene)
    scene.pod(0, ready=False, trouble="ImagePullBackOff: no such image")
    known = dict(scene.observed.instances)
    del known[f"{NAME}-0"]
    scene.see(instances=known)
    deletes = [a.name for a in scene.carry_out() if isinstance(a, Delete)]
    assert deletes == [f"{NAME}-0"]


@pytest.mark.parametrize(
    "peer, goes",
    [
        ({"revision": "other"}, False),  # has not heard of the change
        ({"updated_ready": 0}, False),
        ({"updated_ready": 1}, True),  # a third each
        ({"updated_ready": 1, "replicas": 6}, False),  # only a sixth
        ({"updated_ready": 0, "replicas": 0}, True),  # sleeps
    ],
)
def test_a_new_revision_comes_in_pairs(peer, goes):
    scene = Scene(3)
    revision = scene.observed.pods[0].revision
    old(scene, revision="r1")
    scene.carry_out()
    scene.observed.live["StatefulSet", NAME]["spec"]["replicas"] = 4
    new_pod(scene, 3)
    known = {"revision": revision, "replicas": 3, "updated_ready": 1, **peer}
    both = frozenset({"r1", revision})
    scene.see(peers=(Peer(kind="PrefillGroup", name="chat-prefill", serving=both, **known),))
    actions = scene.carry_out()
    assert any(isinstance(a, Cordon) for a in actions) == goes
    if not goes:
        message = by_type(scene.pool["status"])["Progressing"]["message"]
        assert message == "1 of 3 are replaced; chat-prefill has to come as far first"


# ---- what stops everything


def test_paused():
    scene = draining()
    scene.service["spec"]["paused"] = True
    assert kinds(scene.carry_out()) == ["SetStatus"]
    assert scene.condition("Progressing") == ("False", "Paused")
    assert scene.look() == []


def test_a_wrong_spec_changes_nothing_and_says_so():
    scene = draining()
    scene.service["spec"]["settings"] = {"engine.max_batch": "0"}
    actions = scene.carry_out()
    assert kinds(actions) == ["Report", "SetStatus"]
    assert scene.condition("Degraded") == ("True", "InvalidSpec")
    message = by_type(scene.pool["status"])["Degraded"]["message"]
    assert "engine.max_batch is 0; it must be between 1 and 4096" in message
    assert scene.look() == []


def test_no_service():
    scene = Scene()
    scene.see(service=None)
    assert reasons(scene.carry_out()) == ["ServiceNotFound"]
    assert scene.condition("Degraded") == ("True", "ServiceNotFound")


def test_what_goes_is_left_to_the_garbage_collector():
    scene = draining()
    scene.service["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert scene.look() == []
    scene = draining()
    scene.pool["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert scene.look() == []


def test_a_pool_that_its_service_dropped_drains():
    made = {"ownerReferences": [{"uid": "uid-of-chat", "controller": True}]}
    scene = Scene()
    scene.pool["metadata"] |= made
    del scene.service["spec"]["decode"]
    scene.carry_out()
    assert {e["reason"] for e in scene.pool["status"]["draining"]} == {"Retired"}
    assert size(scene.carry_out()) == 0


def test_trouble_shows():
    scene = Scene()
    scene.pod(1, ready=False, trouble="Unschedulable: 0/3 nodes have a GPU")
    scene.carry_out()
    assert scene.condition("Degraded") == ("True", "InstanceTrouble")
    message = by_type(scene.pool["status"])["Degraded"]["message"]
    assert message == "chat-decode-1: Unschedulable: 0/3 nodes have a GPU"
