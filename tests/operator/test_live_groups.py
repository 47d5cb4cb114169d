"""The running operator with pools whose stages have pods of their own."""

from __future__ import annotations

from typing import Any

import pytest

from support.custom_objects import service
from support.kube_emulator import KubeEmulator
from support.kube_objects import Object
from support.live_operator import operator, rounds
from support.scheduler_peers import Net, spec

pytestmark = pytest.mark.usefixtures("no_watch_goes_on", "short_waits")


def chat(**decode: Any) -> Object:
    pool: Object = {"gpus": 0, "autoscaling": {"mode": "Off", "intervalSeconds": 1}}
    own = {"stages": 3, "stagePods": "Own", **decode}
    return service(
        "chat", redis={"secretRef": {"name": "redis"}}, prefill=pool, decode={**pool, **own}
    )


def names(cluster: KubeEmulator, kind: str) -> list[str]:
    found = [obj["metadata"]["name"] for obj in cluster.all(kind)]
    return [name.removeprefix("chat-decode-") for name in found if name.startswith("chat-decode-")]


def status(cluster: KubeEmulator) -> Object:
    return (cluster.find("DecodePool", "chat-decode") or {}).get("status", {})


def ready(cluster: KubeEmulator) -> int:
    return status(cluster).get("readyReplicas", 0)


async def scale(cluster: KubeEmulator, replicas: int) -> None:
    await cluster.edit("DecodePool", "chat-decode", lambda o: o["spec"].update(replicas=replicas))


GROUP = ["0-0", "0-0-1", "0-0-2"]
BOTH = [*GROUP, "1-0", "1-0-1", "1-0-2"]


@pytest.mark.parametrize("lws", [False, True])
async def test_groups_come_and_go_with_their_instances(cluster: KubeEmulator, lws: bool) -> None:
    if lws:
        cluster.serve("LeaderWorkerSet")
    await cluster.make(chat(replicas=1, drain={"timeoutSeconds": 0}))
    async with operator(cluster):
        await cluster.until(lambda: names(cluster, "Pod") == GROUP and ready(cluster) == 1)
        assert names(cluster, "LeaderWorkerSet") == (["0"] if lws else [])
        await scale(cluster, 2)
        await cluster.until(lambda: names(cluster, "Pod") == BOTH and ready(cluster) == 2)
        await scale(cluster, 0)
        await cluster.until(lambda: not names(cluster, "Pod"))
        await cluster.until(lambda: not names(cluster, "StatefulSet"))
        assert names(cluster, "LeaderWorkerSet") == []


@pytest.mark.parametrize("lws", [False, True])
async def test_the_instance_drains_before_any_of_its_pods_goes(
    cluster: KubeEmulator, net: Net, lws: bool
) -> None:
    if lws:
        cluster.serve("LeaderWorkerSet")
    prefill = await net.worker("chat-prefill-0", role="prefill")
    decode = await net.worker("chat-decode-0-0", role="decode")
    proxy = await net.proxy()
    await proxy.submit(spec("r", 100))
    await proxy.next("placed")
    await cluster.make(chat(replicas=1))
    async with operator(cluster, scheduler=net.address) as running:
        await cluster.until(lambda: ready(cluster) == 1)
        await scale(cluster, 0)
        await cluster.until(lambda: status(cluster).get("draining"))
        await rounds(running, 6)
        assert names(cluster, "Pod") == GROUP
        await prefill.computed("r")
        await prefill.released("r")
        await decode.decoding("r")
        await decode.finished("r")
        await cluster.until(lambda: not names(cluster, "Pod"))


@pytest.mark.parametrize("lws", [False, True])
async def test_a_new_template_reaches_all_pods_of_a_group_at_once(
    cluster: KubeEmulator, lws: bool
) -> None:
    if lws:
        cluster.serve("LeaderWorkerSet")
    await cluster.make(chat(replicas=2, drain={"timeoutSeconds": 0}))
    mixed: list[set[str]] = []

    async def look(request: object) -> None:
        for group in ("chat-decode-0-0", "chat-decode-1-0", "chat-decode-2-0"):
            pods = [p for p in cluster.all("Pod") if p["metadata"]["name"].startswith(group)]
            found = {p["metadata"]["labels"]["millrace.dev/template"] for p in pods}
            if len(found) > 1:
                mixed.append(found)

    async with operator(cluster):
        await cluster.until(lambda: ready(cluster) == 2)
        before = {p["metadata"]["uid"] for p in cluster.all("Pod")}
        cluster.before = look
        new = {"template": {"spec": {"priorityClassName": "high"}}}
        await cluster.edit("ModelService", "chat", lambda o: o["spec"]["decode"].update(new))
        await cluster.until(
            lambda: (
                names(cluster, "Pod") == BOTH
                and before.isdisjoint(
                    p["metadata"]["uid"]
                    for p in cluster.all("Pod")
                    if p["metadata"]["name"].startswith("chat-decode")
                )
            )
        )
        assert not mixed


async def test_a_first_stages_new_pod_gets_new_later_stages(cluster: KubeEmulator) -> None:
    """As after the eviction of the pod: the pods of the later stages go with it."""
    await cluster.make(chat(replicas=1))
    async with operator(cluster):
        await cluster.until(lambda: names(cluster, "Pod") == GROUP and ready(cluster) == 1)
        before = {p["metadata"]["uid"] for p in cluster.all("Pod")}
        await cluster.remove("Pod", "chat-decode-0-0")
        await cluster.until(lambda: names(cluster, "Pod") == GROUP)
        pods = [p for p in cluster.all("Pod") if "decode" in p["metadata"]["name"]]
        assert before.isdisjoint(p["metadata"]["uid"] for p in pods)


async def test_no_later_stages_are_made_for_a_pod_that_is_gone(cluster: KubeEmulator) -> None:
    """It is deleted between the read of the pods and the apply."""
    later = "/statefulsets/chat-decode-0-0"
    removed = False

    async def remove(request: Any) -> None:
        nonlocal removed
        if request.url.path.endswith(later) and not removed:
            removed = True
            await cluster.remove("Pod", "chat-decode-0-0")

    cluster.before = remove
    await cluster.make(chat(replicas=1))
    async with operator(cluster):
        await cluster.until(lambda: names(cluster, "Pod") == GROUP and ready(cluster) == 1)
    assert removed
    (made,) = [o for o in cluster.all("StatefulSet") if o["metadata"]["name"].endswith("-0-0")]
    owner = cluster.find("Pod", "chat-decode-0-0")
    assert owner is not None
    assert made["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]


async def test_what_keeps_a_later_stage_from_starting_shows(cluster: KubeEmulator) -> None:
    cluster.ready_pods = lambda name: name != "chat-decode-0-0"
    await cluster.make(chat(replicas=1))
    async with operator(cluster):
        await cluster.until(lambda: names(cluster, "Pod") == GROUP)
        waiting = {"reason": "ErrImagePull", "message": "no such image"}
        bad = {"containerStatuses": [{"state": {"waiting": waiting}}]}
        no = {"conditions": [{"type": "Ready", "status": "False"}]}
        await cluster.edit("Pod", "chat-decode-0-0-2", lambda o: o.update(status={**bad, **no}))
        why = "chat-decode-0-0: chat-decode-0-0-2: ErrImagePull: no such image"

        def shown() -> bool:
            found = {c["type"]: c for c in status(cluster).get("conditions", [])}
            return found.get("Degraded", {}).get("message") == why

        await cluster.until(shown)
