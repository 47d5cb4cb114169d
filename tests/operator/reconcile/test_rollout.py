"""New templates and new revisions, pass by pass."""

from __future__ import annotations

import pytest

from millrace.core.autoscale.drain import Cordon
from millrace_operator.observed import Peer, Pod
from millrace_operator.reconcile.actions import Delete
from millrace_operator.reconcile.conditions import by_type
from support.pool_scene import NAME, Scene, advice, held, reasons, size


def old(scene: Scene, *, revision: str = "") -> None:
    """All pods have an earlier template."""
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
    scene.knows(made.name, held(0))


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
        assert cordons == [Cordon(instance_id=f"{NAME}-{ordinal}")]
        (delete,) = [a for a in scene.carry_out() if isinstance(a, Delete)]
        assert delete == Delete(kind="Pod", name=f"{NAME}-{ordinal}", uid=f"u{ordinal}")
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
        ({"revision": "other"}, False),  # has not seen the change
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
    scene.see(peers=(Peer(name="chat-prefill", serving=both, **known),))
    actions = scene.carry_out()
    assert any(isinstance(a, Cordon) for a in actions) == goes
    if not goes:
        message = by_type(scene.pool["status"])["Progressing"]["message"]
        assert message == "1 of 3 are replaced; chat-prefill must first replace as large a share"


def shrink(scene: Scene, *, serving: set[str]) -> set[int]:
    """Shrinks to one, beside a pool that serves these revisions: ordinals that still take work."""
    known = {"revision": "other", "replicas": 1, "updated_ready": 0}
    peer = Peer(name="chat-prefill", serving=frozenset(serving), **known)
    scene.see(recommendation=advice(1), peers=(peer,))
    scene.carry_out()
    scene.pool["spec"]["replicas"] = 1
    scene.carry_out()
    return {n for n in range(4) if not scene.observed.instances[f"{NAME}-{n}"].cordoned}


@pytest.mark.parametrize("surge", [0, 1])
def test_a_smaller_pool_keeps_one_of_the_revision_that_others_serve(surge):
    scene = Scene(4, rollout={"maxSurge": surge})
    new = scene.observed.pods[0].revision
    scene.pod(0, template="old", revision="r1")
    scene.pod(1, template="old", revision="r1")
    assert shrink(scene, serving={new}) == ({0, 1, 2} if surge else {0, 2})
    assert size(scene.carry_out()) == 3
    message = by_type(scene.pool["status"])["Progressing"]["message"]
    assert message.endswith(f"; {NAME}-2 stays until others can stand in for it")
    new_pod(scene, 0)
    assert shrink(scene, serving={new}) == {0}


def test_without_surge_a_new_one_stays_until_the_only_old_one_is_replaced():
    scene = Scene(4, rollout={"maxSurge": 0})
    new = scene.observed.pods[0].revision
    scene.pod(0, template="old", revision="r1")
    assert shrink(scene, serving={"r1"}) == {0, 1}
    assert shrink(scene, serving={"r1", new}) == {0, 1}  # the other pool comes first
    new_pod(scene, 0)
    assert shrink(scene, serving={"r1", new}) == {0}


def test_a_smaller_pool_keeps_the_first_that_serves():
    scene = Scene(4)
    revision = scene.observed.pods[0].revision
    scene.pod(0, ready=False)
    scene.pod(1, ready=False)
    assert 2 in shrink(scene, serving={revision})
    assert scene.observed.instances[f"{NAME}-3"].cordoned
    scene.pod(0, ready=True)
    assert shrink(scene, serving={revision}) == {0}
