"""One pool, pass by pass: its actions, their order, and its status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.core.autoscale.drain import Cordon, Evict, Uncordon
from millrace_operator.observed import Ending, ObservedPool
from millrace_operator.reconcile.actions import SetReplicas
from millrace_operator.reconcile.conditions import by_type, timestamp
from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.spec import parse_pool
from support.custom_resources import DEFAULTS, model_service, pool
from support.pool_scene import CALM, NAME, NOW_S, Scene, advice, held, kinds, reasons, size


def test_a_calm_pool_is_left_alone():
    scene = Scene()
    assert scene.look() == []
    scene.see(now_s=NOW_S + 3600)
    assert scene.look() == []


def test_the_first_pass_makes_everything_and_the_first_size():
    first = pool()
    first["metadata"]["annotations"] = {"millrace.dev/initial-replicas": "4"}
    seen = ObservedPool(
        service=model_service(), recommendation=advice(9), now_s=NOW_S, unix_s=NOW_S
    )
    actions = reconcile_pool(parse_pool(first), seen, DEFAULTS)
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
    """If it is followed, a recommendation would wait for the next step; here it would come and
    go.
    """
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


def test_a_signal_that_fades_away_is_written_once_as_nothing():
    scene = Scene()
    scene.see(metrics=replace(CALM, kv_utilisation=1e-3), now_s=NOW_S + 60)
    assert kinds(scene.carry_out()) == ["SetStatus"]
    assert scene.pool["status"]["metrics"][0]["value"] == "0"
    scene.see(metrics=replace(CALM, kv_utilisation=1e-9), now_s=NOW_S + 120)
    assert scene.look() == []


def test_a_mixed_pools_status_shows_the_signals_of_both():
    scene = Scene(role="mixed")
    scene.see(metrics=replace(CALM, backlog_s=6.0, arriving=1.5), now_s=NOW_S + 60)
    scene.carry_out()
    assert scene.pool["status"]["metrics"] == [
        {"name": "kvUtilization", "value": "0.51", "target": "0.8"},
        {"name": "backlogSeconds", "value": "2", "target": "4"},
        {"name": "utilization", "value": "0.5", "target": "0.8"},
    ]


def test_no_metrics():
    scene = Scene()
    scene.see(metrics_error="the scheduler does not answer")
    scene.carry_out()
    assert scene.condition("MetricsAvailable") == ("False", "NoFreshSample")
    assert scene.condition("ScalingActive") == ("False", "MetricsUnavailable")


# ---- drains


def draining(requests: int = 2, **spec: Any) -> Scene:
    """One of three instances is surplus, and holds requests."""
    scene = Scene(**spec)
    scene.knows(f"{NAME}-2", held(requests))
    scene.pool["spec"]["replicas"] = 2
    scene.see(recommendation=advice(2))
    return scene


def test_scale_in_cordons_first():
    scene = draining()
    actions = scene.carry_out()
    assert kinds(actions) == ["Report", "SetStatus", "Cordon"]
    assert actions[-1] == Cordon(instance_id=f"{NAME}-2")
    assert scene.pool["status"]["draining"] == [
        {"pod": f"{NAME}-2", "uid": "u2", "since": timestamp(NOW_S), "reason": "ScaleIn"}
    ]
    assert scene.condition("Draining") == ("True", "InstancesDrain")
    assert scene.look() == []
    scene.knows(f"{NAME}-2", held(0, cordoned=True))
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
    assert kinds(actions) == ["Uncordon", "SetStatus"]
    assert actions[0] == Uncordon(instance_id=f"{NAME}-2")
    assert "draining" not in scene.pool["status"]


def test_the_highest_ordinal_that_still_works_keeps_those_below():
    scene = draining()
    scene.pool["spec"]["replicas"] = 1
    scene.see(recommendation=advice(1))
    scene.carry_out()
    assert size(scene.look()) is None  # of 1 and 2, both cordoned, 1 is empty and 2 is not
    scene.knows(f"{NAME}-2", held(0, cordoned=True))
    assert size(scene.look()) == 1


@pytest.mark.parametrize(
    "on_timeout, evicted", [("Migrate", [False]), ("Abort", [True]), ("Wait", [])]
)
def test_when_its_time_is_over(on_timeout, evicted):
    scene = draining(drain={"timeoutSeconds": 100, "onTimeout": on_timeout})
    scene.carry_out()
    scene.see(now_s=NOW_S + 99)
    assert kinds(scene.look()) == ["SetStatus"]  # how long it has waited
    scene.see(now_s=NOW_S + 100)
    actions = scene.carry_out()
    assert [a.abort for a in actions if isinstance(a, Evict)] == evicted
    assert size(actions) is None
    assert reasons(actions) == ["DrainTimedOut"]
    assert reasons(scene.carry_out()) == []
    scene.see(now_s=NOW_S + 160)
    assert size(scene.look()) == (None if on_timeout == "Wait" else 2)


def test_the_status_keeps_how_long_a_drain_has_waited():
    scene = draining(drain={"timeoutSeconds": 100})
    scene.carry_out()
    kept = []
    for waited_s in (29, 30, 59, 99, 159, 200, 9000):
        scene.see(now_s=NOW_S + waited_s)
        scene.carry_out()
        kept.append(scene.pool["status"]["draining"][0].get("waitedSeconds"))
    assert kept == [None, 30, 30, 90, 150, 150, 150]  # after that nothing depends on it


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_signals_are_shown_again_after_a_step_of_the_wall_clock(step_s):
    scene = Scene()
    scene.see(metrics=replace(CALM, kv_utilisation=0.6), unix_s=NOW_S + step_s)
    assert kinds(scene.carry_out()) == ["SetStatus"]
    scene.see(metrics=replace(CALM, kv_utilisation=0.7), unix_s=NOW_S + step_s + 29)
    assert scene.look() == []


def test_a_silent_scheduler_keeps_everybody_until_the_timeout():
    scene = draining(requests=0, drain={"timeoutSeconds": 100})
    scene.see(instances=None)
    assert kinds(scene.carry_out()) == ["Report", "SetStatus"]
    scene.see(now_s=NOW_S + 99)
    assert kinds(scene.look()) == ["SetStatus"]  # how long it has waited
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


# ---- conditions that stop everything


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
    scene = Scene(kind="PrefillGroup")
    scene.pool["metadata"] |= made
    del scene.service["spec"]["prefill"]
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


def test_pods_that_are_not_made_show_where_the_reason_stands():
    scene = Scene()
    scene.see(pods=scene.observed.pods[:1])
    scene.carry_out()

    def progress() -> str:
        return by_type(scene.pool["status"])["Progressing"]["message"]

    assert progress() == "1 of 3 instances take work"
    scene.see(now_s=NOW_S + 19)
    assert scene.look() == []
    scene.see(now_s=NOW_S + 20)
    scene.carry_out()
    assert progress() == (
        "1 of 3 instances take work; 1 of 3 pods are made: `kubectl describe statefulset "
        "chat-decode` says what refuses the others"
    )
    assert scene.look() == []


def test_a_pod_that_its_node_does_not_remove_is_told_with_what_to_do():
    """Its node is lost: no successor of its name starts while it is there."""
    scene = Scene(1)
    ending = Ending(name=f"{NAME}-0", node="n1", by_s=NOW_S + 60, due_s=NOW_S + 60)
    scene.pod(0, ready=False, terminating=True, endings=(ending,))
    scene.see(now_s=NOW_S + 119)
    scene.carry_out()
    assert scene.condition("Degraded")[0] == "False"  # it drains
    scene.see(now_s=NOW_S + 120)
    scene.carry_out()
    assert scene.condition("Degraded") == ("True", "InstanceTrouble")
    for kind in ("Degraded", "Available"):
        assert by_type(scene.pool["status"])[kind]["message"] == (
            f"chat-decode-0: should have ended by {timestamp(NOW_S + 60)}, but node n1 does not "
            "confirm that it has. If that machine is off for good, let its successor start: "
            "`kubectl delete pod chat-decode-0 --force`"
        )
    assert scene.look() == []


def test_a_drain_that_is_taken_back_in_silence_counts_once_the_scheduler_says_so():
    scene = Scene(3)
    scene.see(recommendation=advice(2))
    scene.carry_out()
    assert scene.observed.instances[f"{NAME}-2"].cordoned
    known = scene.observed.instances
    scene.see(instances=None, recommendation=advice(3), now_s=NOW_S + 30)
    scene.pool["spec"]["replicas"] = 2
    scene.carry_out()
    scene.pool["spec"]["replicas"] = 3
    scene.carry_out()
    (entry,) = scene.pool["status"]["draining"]
    assert entry == {
        "pod": f"{NAME}-2",
        "uid": "u2",
        "since": timestamp(NOW_S),
        "returning": True,
    }
    assert scene.pool["status"]["readyReplicas"] == 2
    assert scene.condition("Draining")[0] == "False"
    assert scene.condition("Progressing") == ("True", "Scaling")
    assert scene.look() == []
    scene.see(instances=known)
    actions = scene.carry_out()
    assert actions[0] == Uncordon(instance_id=f"{NAME}-2")
    assert "draining" not in scene.pool["status"]
    assert scene.pool["status"]["readyReplicas"] == 3


def test_an_instance_that_leaves_again_before_it_is_back_has_its_whole_time():
    scene = Scene(3)
    scene.see(recommendation=advice(2))
    scene.carry_out()
    known = {**scene.observed.instances, f"{NAME}-2": held(1, cordoned=True)}
    for replicas, now_s in ((3, NOW_S + 200), (2, NOW_S + 400)):
        scene.see(instances=None, recommendation=advice(replicas), now_s=now_s)
        scene.pool["spec"]["replicas"] = replicas
        actions = scene.carry_out()
    assert reasons(actions) == ["Draining"]
    (entry,) = scene.pool["status"]["draining"]
    assert entry["since"] == timestamp(NOW_S + 400) and "returning" not in entry
    scene.see(instances=known)
    assert not any(isinstance(action, Evict) for action in scene.carry_out())
