"""The operator as a process, with only the chart's rights, against a real API server.

Nodes are a stand-in, and instances are streams to a real scheduler; all else is as in a cluster.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.wire.clients.scheduler_client import get_instances
from support.custom_objects import VERSION
from support.kube_api import WAIT_S, Object, condition, soon
from support.operator_world import World, answer
from support.scheduler_peers import spec

CHILDREN = {
    ("v1", "ConfigMap", "chat-config"),
    ("apps/v1", "Deployment", "chat-scheduler"),
    ("v1", "Service", "chat-scheduler"),
    ("apps/v1", "Deployment", "chat-proxy"),
    ("v1", "Service", "chat-proxy"),
    ("policy/v1", "PodDisruptionBudget", "chat-proxy"),
    (VERSION, "PrefillGroup", "chat-prefill"),
    (VERSION, "DecodePool", "chat-decode"),
}
GRANDCHILDREN = {
    (version, kind, name)
    for name in ("chat-prefill", "chat-decode")
    for version, kind in (
        ("apps/v1", "StatefulSet"),
        ("v1", "Service"),
        ("policy/v1", "PodDisruptionBudget"),
    )
}


def child(world: World, version: str, kind: str, name: str) -> Object:
    found = world.api.get(version, kind, world.namespace, name)
    assert found is not None, (kind, name)
    return found


def stateful_set(world: World, name: str) -> Object:
    return child(world, "apps/v1", "StatefulSet", name)


async def test_a_service_gets_its_children_and_then_peace(world: World) -> None:
    await world.serve()
    owners = {("ModelService", "chat"): CHILDREN}
    owners |= {
        (kind, name): {one for one in GRANDCHILDREN if one[2] == name}
        for kind, name in (("PrefillGroup", "chat-prefill"), ("DecodePool", "chat-decode"))
    }
    for (kind, name), children in owners.items():
        uid = child(world, VERSION, kind, name)["metadata"]["uid"]
        for one in children:
            meta = child(world, *one)["metadata"]
            (owner,) = meta["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["uid"]) == (kind, name, uid)
            assert owner["controller"]
            managers = {entry["manager"] for entry in meta["managedFields"]}
            assert "millrace-operator" in managers
            assert meta["labels"]["app.kubernetes.io/managed-by"] == "millrace-operator"
    service = world.service()
    assert service["status"]["prefillReady"] == service["status"]["decodeReady"] == "1/1"
    assert service["status"]["endpoint"] == f"http://chat-proxy.{world.namespace}.svc:80"
    assert "finalizers" not in service["metadata"]


async def test_an_operator_with_nothing_to_do_writes_nothing(audit: None, world: World) -> None:
    await world.serve()
    await at_rest(world)


async def at_rest(world: World) -> None:
    """The operator continues its passes, and writes nothing for some rounds."""
    await soon(lambda: looks_since_write(world) > 12, 60.0, what="at rest")


def looks_since_write(world: World) -> int:
    """Returns how often the operator has read since it last wrote (except its lease)."""
    verbs = [
        call["verb"]
        for call in world.plane.calls_of(world.namespace, "llm-operator")
        if call["objectRef"].get("resource") != "leases"
    ]
    return next(
        (at for at, verb in enumerate(reversed(verbs)) if verb not in ("get", "list", "watch")), 0
    )


async def test_what_somebody_spoils_is_mended(world: World) -> None:
    await world.serve()
    proxy = ("apps/v1", "Deployment", "chat-proxy")
    uid = child(world, *proxy)["metadata"]["uid"]
    world.api.delete(child(world, *proxy))
    spoilt = {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}
    world.api.merge(stateful_set(world, "chat-decode"), spoilt)

    def mended() -> bool:
        found = world.api.get(*proxy[:2], world.namespace, proxy[2])
        remade = found is not None and found["metadata"]["uid"] != uid
        strategy = stateful_set(world, "chat-decode")["spec"]["updateStrategy"]
        return remade and strategy == {"type": "OnDelete"}

    await soon(mended, what="mended")


async def test_a_person_scales_and_gitops_does_not_undo_it(world: World) -> None:
    await world.serve()
    world.scale("PrefillGroup", 3)
    await soon(lambda: world.pool("PrefillGroup").get("status", {}).get("readyReplicas") == 3)
    world.apply(slo={"ttftSeconds": "5"})  # the operator applies its pools again
    await world.settled()
    assert world.pool("PrefillGroup")["spec"]["replicas"] == 3
    assert world.service()["status"]["prefillReady"] == "3/3"


async def test_an_hpa_drives_a_pool(controllers: None, world: World) -> None:
    external = {"autoscaling": {"mode": "External", "intervalSeconds": 1}}
    await world.serve(prefill=external)
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x", "namespace": world.namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": VERSION,
                "kind": "PrefillGroup",
                "name": "chat-prefill",
            },
            "minReplicas": 3,
            "maxReplicas": 3,
        },
    }
    world.api.apply(hpa)
    await soon(lambda: world.pool("PrefillGroup")["status"]["readyReplicas"] == 3)
    active = next(
        c
        for c in world.pool("PrefillGroup")["status"]["conditions"]
        if c["type"] == "ScalingActive"
    )
    assert (active["status"], active["reason"]) == ("False", "ModeExternal")


async def hold_one(world: World) -> tuple[Any, Any]:
    """A request that decode-1 of two holds, with the workers of prefill-0 and decode-1."""
    await world.serve(decode={"replicas": 2})
    prefill = await world.worker("chat-prefill-0")
    leaving = await world.worker("chat-decode-1")
    proxy = await world.net.proxy()
    await proxy.submit(spec("r"))
    await proxy.next("placed")
    await world.worker("chat-decode-0")
    return prefill, leaving


async def cordoned(world: World) -> set[str]:
    instances = await get_instances(world.net.address)
    return {one.id for one in instances if one.draining}


async def test_scale_in_waits_for_what_an_instance_holds(world: World) -> None:
    prefill, leaving = await hold_one(world)
    world.scale("DecodePool", 1)
    await soon(lambda: condition(world.pool("DecodePool"), "Draining") == "True")
    (entry,) = world.pool("DecodePool")["status"]["draining"]
    assert entry["pod"] == "chat-decode-1" and entry["reason"] == "ScaleIn"

    async with asyncio.timeout(WAIT_S):
        while await cordoned(world) != {"chat-decode-1"}:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    assert stateful_set(world, "chat-decode")["spec"]["replicas"] == 2
    assert "deletionTimestamp" not in world.pods("DecodePool")["chat-decode-1"]["metadata"]
    await answer("r", prefill, leaving)
    await soon(lambda: world.pods("DecodePool").keys() == {"chat-decode-0"}, what="pods")
    await world.settled()
    assert "draining" not in world.pool("DecodePool")["status"]
    if world.plane.audit is not None:
        await at_rest(world)


@pytest.mark.parametrize(("on_timeout", "abort"), [("Migrate", False), ("Abort", True)])
async def test_a_drain_that_takes_too_long_evicts(
    world: World, on_timeout: str, abort: bool
) -> None:
    world.apply(decode={"drain": {"timeoutSeconds": 1, "onTimeout": on_timeout}})
    prefill, leaving = await hold_one(world)
    world.scale("DecodePool", 1)
    while (command := await leaving.next()).WhichOneof("kind") != "drain":
        pass
    assert command.drain.abort == abort
    assert "chat-decode-1" in world.pods("DecodePool")
    await answer("r", prefill, leaving)
    await soon(lambda: world.pods("DecodePool").keys() == {"chat-decode-0"}, what="pods")


async def test_load_that_the_scheduler_tells_scales_a_pool_up(world: World) -> None:
    internal = {
        "mode": "Internal",
        "intervalSeconds": 1,
        "metrics": [{"name": "backlogSeconds", "target": "1"}],
    }
    await world.serve(prefill={"autoscaling": internal})
    await world.worker("chat-prefill-0", kv_pages=10_000)
    await world.worker("chat-decode-0", kv_pages=10_000)
    proxy = await world.net.proxy()
    for name in ("a", "b", "c"):
        await proxy.submit(spec(name, prompt_tokens=4000))  # 4 s each, as the worker reports
        await proxy.next("placed")
    # Ten times an instance's target; two instances are added at a time.
    await soon(lambda: world.pool("PrefillGroup")["spec"]["replicas"] >= 3, what="replicas")
    await soon(lambda: len(world.pods("PrefillGroup")) >= 3, what="pods")

    def told() -> bool:
        events = world.api.list("events.k8s.io/v1", "Event", world.namespace)
        notes = [event["note"] for event in events if event.get("reason") == "Scaled"]
        why = world.pool("PrefillGroup")["status"].get("lastScaleReason", "")
        return "backlog" in why and any("backlog" in note for note in notes)

    await soon(told, what="told")
