"""A pool whose stages have pods of their own, pass by pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.core.autoscale.drain import Cordon, Registration, Uncordon
from millrace_operator.manifests.naming import REVISION_LABEL, TEMPLATE_LABEL
from millrace_operator.observed import ObservedPool, Pod
from millrace_operator.reconcile.actions import Apply, Delete, SetStatus
from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.spec import parse_pool
from support.custom_resources import DEFAULTS, model_service, pool
from support.pool_scene import CALM, NOW_S, advice, held, reasons, timed_by_status

NAME = "chat-decode"
Key = tuple[str, str]


class GroupScene:
    """A pool of groups: `settle` makes what a cluster makes of the operator's objects."""

    def __init__(
        self, size: int = 2, *, kind: str = "DecodePool", lws: bool = False, **spec: Any
    ) -> None:
        self.pool = pool(kind, NAME, replicas=size, stages=3, stagePods="Own", **spec)
        self.service = model_service()
        self.live: dict[Key, dict[str, Any]] = {}
        self.pods: dict[int, Pod] = {}
        self.known: dict[str, Registration] = {}
        self.lws = lws
        self.now_s = NOW_S
        self.uids = 0
        self.settle()

    def look(self) -> list[Any]:
        """Returns the actions of a pass, carried out."""
        observed = ObservedPool(
            service=self.service,
            live=dict(self.live),
            pods=tuple(self.pods[n] for n in sorted(self.pods)),
            instances=self.known,
            metrics=CALM,
            recommendation=advice(self.pool["spec"]["replicas"]),
            has_leader_worker_sets=self.lws,
            now_s=self.now_s,
            unix_s=self.now_s,
        )
        observed = timed_by_status(observed, self.pool.get("status", {}))
        actions = reconcile_pool(parse_pool(self.pool), observed, DEFAULTS)
        for action in actions:
            match action:
                case Apply(manifest=manifest):
                    key = manifest["kind"], manifest["metadata"]["name"]
                    self.uids += 1
                    uid = self.live.get(key, {"metadata": {"uid": f"s{self.uids}"}})["metadata"]
                    meta = {**manifest["metadata"], "uid": uid["uid"]}
                    self.live[key] = {**manifest, "metadata": meta}
                case Delete(kind=kind, name=name, uid=uid):
                    assert self.live.pop((kind, name))["metadata"]["uid"] == uid
                case SetStatus(status=status):
                    self.pool["status"] = dict(status)
                case Cordon(instance_id=name) | Uncordon(instance_id=name):
                    cordoned = isinstance(action, Cordon)
                    self.known[name] = replace(self.known[name], cordoned=cordoned)
        return actions

    def make_pods(self) -> None:
        """Removes the pods of removed objects, and then makes missing pods, ready."""
        for number, pod in list(self.pods.items()):
            if not self.maker(number) or pod.terminating:
                del self.pods[number]
                self.known.pop(pod.name, None)
                self.live.pop(("StatefulSet", pod.name), None)  # it goes with its owner
        for kind, name in list(self.live):
            number = name.removeprefix(f"{NAME}-")
            if kind in ("StatefulSet", "LeaderWorkerSet") and number.isdecimal():
                self.make_pod(int(number))

    def make_pod(self, number: int) -> None:
        if number in self.pods:
            return
        spec = self.live[self.maker(number)]["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
        labels = template["metadata"]["labels"]
        self.uids += 1
        self.pods[number] = Pod(
            name=f"{NAME}-{number}-0",
            uid=f"p{self.uids}",
            ordinal=number,
            template=labels[TEMPLATE_LABEL],
            revision=labels[REVISION_LABEL],
            ready=True,
        )
        self.known[self.pods[number].name] = held(0)

    def maker(self, number: int) -> Any:
        keys = [(kind, f"{NAME}-{number}") for kind in ("StatefulSet", "LeaderWorkerSet")]
        return next((key for key in keys if key in self.live), None)

    def settle(self) -> list[list[Any]]:
        """Passes until one has nothing to do; returns the actions of each."""
        found = []
        while actions := self.look():
            assert len(found) < 40, actions
            found.append(actions)
            self.make_pods()
        return found

    def makers(self) -> list[Key]:
        return sorted(key for key in self.live if key[0].endswith("Set"))

    def change(self, number: int, **what: Any) -> None:
        self.pods[number] = replace(self.pods[number], **what)

    def holds(self, number: int, requests: int, *, cordoned: bool = False) -> None:
        self.known[f"{NAME}-{number}-0"] = held(requests, cordoned=cordoned)

    def scale(self, replicas: int) -> None:
        self.pool["spec"]["replicas"] = replicas

    def draining(self) -> dict[str, str]:
        return {e["pod"]: e["reason"] for e in self.pool["status"].get("draining", [])}


def deleted(actions: list[Any]) -> list[Key]:
    return [(a.kind, a.name) for a in actions if isinstance(a, Delete)]


def applied(actions: list[Any]) -> list[Key]:
    manifests = [a.manifest for a in actions if isinstance(a, Apply)]
    return [(m["kind"], m["metadata"]["name"]) for m in manifests]


def sets(*names: str) -> list[Key]:
    return [("StatefulSet", f"{NAME}-{name}") for name in names]


def test_each_instance_has_a_set_of_its_first_stage_and_then_of_the_others() -> None:
    scene = GroupScene()
    assert scene.makers() == sets("0", "0-0", "1", "1-0")
    owners = [scene.live[key]["metadata"]["ownerReferences"][0] for key in sets("0-0", "1-0")]
    assert [(o["kind"], o["uid"]) for o in owners] == [("Pod", scene.pods[n].uid) for n in range(2)]
    assert scene.pool["status"]["selector"] == (
        "millrace.dev/pool=chat-decode,millrace.dev/stage=first"
    )
    assert scene.pool["status"]["readyReplicas"] == 2


def test_later_stages_wait_for_the_pod_that_owns_them() -> None:
    scene = GroupScene(0)
    scene.scale(1)
    assert applied(scene.look()) == sets("0")
    assert applied(scene.look()) == []
    scene.make_pods()
    assert applied(scene.look()) == sets("0-0")


def test_a_larger_size_makes_more_groups() -> None:
    scene = GroupScene()
    scene.scale(4)
    scene.settle()
    assert scene.makers() == sets("0", "0-0", "1", "1-0", "2", "2-0", "3", "3-0")


def test_a_smaller_size_drains_the_instance_and_then_removes_its_group() -> None:
    scene = GroupScene()
    scene.holds(1, 2)
    scene.scale(1)
    actions = scene.look()
    assert deleted(actions) == [] and reasons(actions) == ["Draining"]
    assert scene.draining() == {"chat-decode-1-0": "ScaleIn"}
    assert scene.look() == []
    scene.holds(1, 0, cordoned=True)
    # The pods of its later stages are not touched: they go with the first stage's pod.
    assert deleted(scene.look()) == sets("1")
    scene.make_pods()
    scene.settle()
    assert scene.makers() == sets("0", "0-0")


def test_groups_below_a_busy_one_stay() -> None:
    scene = GroupScene(3)
    scene.holds(2, 1)
    scene.scale(1)
    scene.look()
    assert deleted(scene.look()) == []
    scene.holds(2, 0, cordoned=True)
    assert sorted(deleted(scene.look())) == sets("1", "2")


def test_a_size_that_was_never_reached_leaves_nothing() -> None:
    scene = GroupScene(1)
    scene.scale(3)
    scene.look()  # pods are not made yet
    scene.scale(1)
    scene.settle()
    assert scene.makers() == sets("0", "0-0")


def new_template(scene: GroupScene, **more: Any) -> None:
    scene.pool["spec"]["template"] = {"spec": {"priorityClassName": "high", **more}}


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("lws", [False, True])
def test_a_rollout_replaces_whole_groups_one_at_a_time(lws: bool, surge: int) -> None:
    scene = GroupScene(lws=lws, rollout={"maxSurge": surge})
    old = {scene.pods[n].uid for n in range(2)}
    new_template(scene)
    order = []
    for _ in range(40):
        actions = scene.look()
        order += deleted(actions)
        for name, labels in scene_templates(scene).items():
            assert len(labels) == 1, f"{name} has pods of several templates"
        scene.make_pods()
        serving = [p for p in scene.pods.values() if p.name not in scene.draining()]
        assert len(serving) >= 2 - (1 - surge)
    kind = "LeaderWorkerSet" if lws else "StatefulSet"
    replaced = [(kind, f"{NAME}-{n}") for n in (1, 0)]
    surged = [(kind, f"{NAME}-2")] if surge else []
    assert order == [*replaced, *surged]
    assert old.isdisjoint(pod.uid for pod in scene.pods.values())
    assert {pod.template for pod in scene.pods.values()} == {scene.pool["status"]["template"]}
    assert scene.look() == [] and len(scene.pods) == 2


def scene_templates(scene: GroupScene) -> dict[str, set[str]]:
    """Returns the templates of each group's pods, as its objects would make them."""
    found: dict[str, set[str]] = {}
    for (kind, name), obj in scene.live.items():
        if kind == "StatefulSet":
            labels = obj["spec"]["template"]["metadata"]["labels"]
            group = name.removesuffix("-0") if name.count("-") == 3 else name
            found.setdefault(group, set()).add(labels[TEMPLATE_LABEL])
        elif kind == "LeaderWorkerSet":
            parts = obj["spec"]["leaderWorkerTemplate"]
            for part in ("leaderTemplate", "workerTemplate"):
                labels = parts[part]["metadata"]["labels"]
                found.setdefault(name, set()).add(labels[TEMPLATE_LABEL])
    return found


def test_an_old_first_stage_gets_no_new_later_stages() -> None:
    """Its pod was made again, by its old StatefulSet, while the template was changed."""
    scene = GroupScene(drain={"timeoutSeconds": 0})
    del scene.live["StatefulSet", f"{NAME}-0-0"]
    scene.change(0, uid="again", ready=False, unready_since_s=NOW_S)
    del scene.known[f"{NAME}-0-0"]
    new_template(scene)
    assert sets("0-0")[0] not in applied(scene.look())
    scene.now_s = NOW_S + 61
    assert sets("0")[0] in deleted(scene.look())


def test_a_successor_gets_later_stages_once_those_of_its_predecessor_are_gone() -> None:
    scene = GroupScene()
    scene.change(0, uid="successor")
    assert scene.look() == []
    del scene.live["StatefulSet", f"{NAME}-0-0"]  # the garbage collector
    assert applied(scene.look()) == sets("0-0")
    assert scene.look() == []


def test_when_a_later_stages_pod_leaves_the_instance_drains_and_its_group_is_replaced() -> None:
    scene = GroupScene()
    scene.holds(0, 1)
    scene.change(0, loses_stage=True)
    actions = scene.look()
    assert reasons(actions) == ["Draining"]
    assert scene.draining() == {"chat-decode-0-0": "StageLeaves"}
    assert deleted(actions) == []
    assert scene.look() == []
    scene.holds(0, 0, cordoned=True)
    actions = scene.look()
    assert deleted(actions) == sets("0") and reasons(actions) == ["Drained"]
    before = scene.pods[0].uid
    scene.make_pods()
    scene.settle()
    assert scene.pods[0].uid != before
    assert scene.makers() == sets("0", "0-0", "1", "1-0")


def test_an_instance_that_loses_a_stage_stands_in_for_nobody() -> None:
    """In a rollout, at most one of two instances may leave; the other has just lost a stage."""
    scene = GroupScene(rollout={"maxSurge": 0})
    new_template(scene)
    scene.holds(0, 1)
    scene.change(0, loses_stage=True)
    scene.look()
    assert list(scene.draining()) == ["chat-decode-0-0"]


def test_a_retired_pool_loses_all_groups() -> None:
    scene = GroupScene(kind="PrefillGroup")
    scene.pool["metadata"]["ownerReferences"] = [{"uid": "uid-of-chat", "controller": True}]
    del scene.service["spec"]["prefill"]
    scene.settle()
    assert scene.makers() == []


# ---- LeaderWorkerSets


def leader_worker_sets(*names: str) -> list[Key]:
    return [("LeaderWorkerSet", f"{NAME}-{name}") for name in names]


def test_where_the_cluster_has_leader_worker_sets_each_instance_is_one() -> None:
    scene = GroupScene(lws=True)
    assert scene.makers() == leader_worker_sets("0", "1")
    scene.scale(1)
    scene.settle()
    assert scene.makers() == leader_worker_sets("0")


@pytest.mark.parametrize("lws", [False, True])
def test_a_group_keeps_its_kind_until_it_is_replaced(lws: bool) -> None:
    scene = GroupScene(lws=lws)
    before = scene.makers()
    scene.lws = not lws
    assert scene.look() == []
    assert scene.makers() == before
    new_template(scene)
    scene.settle()
    kinds = {kind for kind, _ in scene.makers()}
    assert kinds == ({"StatefulSet"} if lws else {"LeaderWorkerSet"})
