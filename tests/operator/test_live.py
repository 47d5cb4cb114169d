"""The running operator: kopf watches an emulated API server, and a real scheduler answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest

from millrace.wire.clients import scheduler_client
from millrace.wire.pb import scheduler_pb2
from millrace_operator.run import cluster as around
from millrace_operator.run.election import LeaseLost
from support.custom_objects import pool, service
from support.kube_emulator import Fault, KubeEmulator
from support.kube_objects import Object
from support.live_operator import ROUNDS, operator, rounds, total
from support.scheduler_peers import Net, Worker, spec

pytestmark = pytest.mark.usefixtures("no_watch_goes_on", "short_waits")


def chat(*, name: str = "chat", mode: str = "Internal", **pools: Object) -> Object:
    """A ModelService on CPUs, whose pools check their load every second."""
    pool: Object = {"gpus": 0, "autoscaling": {"mode": mode, "intervalSeconds": 1}}
    given = {role: {**pool, **pools.get(role, {})} for role in ("prefill", "decode")}
    return service(name, redis={"secretRef": {"name": "redis"}}, **given)


def condition(obj: Object | None, name: str) -> Object:
    found = (obj or {}).get("status", {}).get("conditions", [])
    return next((entry for entry in found if entry["type"] == name), {})


def ready(cluster: KubeEmulator, name: str = "chat") -> bool:
    return condition(cluster.find("ModelService", name), "Available").get("status") == "True"


def size(cluster: KubeEmulator, name: str = "chat-decode") -> int | None:
    found = cluster.find("StatefulSet", name)
    return found and found["spec"]["replicas"]


def draining(cluster: KubeEmulator) -> list[Object]:
    pool = cluster.find("DecodePool", "chat-decode")
    return (pool or {}).get("status", {}).get("draining", [])


def lease(cluster: KubeEmulator) -> Object:
    return cluster.find("Lease", "millrace-operator")["spec"]


def writes(cluster: KubeEmulator) -> list[tuple[str, str, str]]:
    """Returns the requests without the lease's renewals."""
    return [write for write in cluster.writes if "/leases" not in write[1]]


def told(cluster: KubeEmulator) -> tuple[str, str]:
    """Returns ready instances of prefill and decode, as `kubectl get ms` shows them."""
    status = cluster.find("ModelService", "chat")["status"]
    return status["prefillReady"], status["decodeReady"]


def why(cluster: KubeEmulator) -> str:
    """Returns the reason of the decode pool's last scaling."""
    return cluster.find("DecodePool", "chat-decode")["status"].get("lastScaleReason", "")


def warned(cluster: KubeEmulator, reason: str) -> set[tuple[str, str]]:
    """Returns the names and the messages of Warnings."""
    return {
        (event["regarding"]["name"], event["note"])
        for event in cluster.all("Event")
        if (event["type"], event["reason"]) == ("Warning", reason)
    }


async def resize(cluster: KubeEmulator, replicas: int) -> None:
    """Scales as `kubectl scale` does."""
    await cluster.edit("DecodePool", "chat-decode", lambda o: o["spec"].update(replicas=replicas))


async def workers(net: Net, decodes: int) -> dict[str, Worker]:
    """Registers one prefill instance and some decode instances, as the pods would."""
    found = {"chat-prefill-0": await net.worker("chat-prefill-0", role="prefill")}
    for number in range(decodes):
        name = f"chat-decode-{number}"
        found[name] = await net.worker(name, role="decode")
    return found


async def holder(net: Net, *request_ids: str, prompt_tokens: int = 100) -> None:
    """Places requests, one after another."""
    proxy = await net.proxy()
    for request_id in request_ids:
        await proxy.submit(spec(request_id, prompt_tokens))
        await proxy.next("placed")


async def held(net: Net) -> dict[str, int]:
    views = await scheduler_client.get_instances(net.address)
    return {view.id: view.held_requests for view in views}


async def test_children_appear_and_follow_the_spec(cluster: KubeEmulator):
    await cluster.make(chat(mode="Off", decode={"replicas": 2}))
    async with operator(cluster) as running:
        await cluster.until(lambda: ready(cluster) and running.ready())
        await cluster.until(lambda: told(cluster) == ("1/1", "2/2"))
        await cluster.edit(
            "ModelService", "chat", lambda o: o["spec"]["gateway"].update(replicas=3)
        )
        await cluster.until(
            lambda: cluster.find("Deployment", "chat-proxy")["spec"]["replicas"] == 3
        )
        await resize(cluster, 4)
        await cluster.until(lambda: size(cluster) == 4)


async def test_what_others_change_or_delete_comes_back(
    cluster: KubeEmulator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(around, "READ_AGAIN_S", 0.5)  # budgets are not watched

    def grace(change: int | None = None) -> int:
        spec = cluster.find("StatefulSet", "chat-decode")["spec"]["template"]["spec"]
        return spec["terminationGracePeriodSeconds"]

    def meddle(obj: Object) -> None:
        obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1

    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: ready(cluster))
        await cluster.remove("PodDisruptionBudget", "chat-prefill")
        await cluster.edit("StatefulSet", "chat-decode", meddle)
        await cluster.until(
            lambda: grace() > 1 and cluster.find("PodDisruptionBudget", "chat-prefill")
        )


async def test_kopf_leaves_no_trace_and_a_deletion_waits_for_nobody(cluster: KubeEmulator):
    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: ready(cluster))
    kinds = ("ModelService", "PrefillGroup", "DecodePool", "StatefulSet", "Deployment", "Pod")
    for meta in (obj["metadata"] for kind in kinds for obj in cluster.all(kind)):
        assert "finalizers" not in meta
        assert not [name for name in meta.get("annotations", {}) if "kopf" in name]
    assert {manager for _, _, manager in cluster.writes} == {"millrace-operator"}
    await cluster.remove("ModelService", "chat")  # while no operator runs
    assert {kind for kind, *_ in cluster.names()} == {"Lease"}


async def test_what_is_deleted_is_not_made_again(cluster: KubeEmulator):
    await cluster.make(chat())
    async with operator(cluster) as running:
        await cluster.until(lambda: size(cluster))
        await cluster.remove("ModelService", "chat")
        await cluster.make(chat(name="next"))
        await cluster.until(lambda: ready(cluster, "next"))
        await rounds(running, 2)
        left = [(kind, name) for kind, _, name in cluster.names() if name.startswith("chat")]
        assert not [entry for entry in left if entry[0] != "Event"]  # these outlive their objects


async def test_a_pod_of_the_gateway_that_does_not_start_shows(cluster: KubeEmulator):
    cluster.ready_pods = lambda name: name != "chat-proxy"
    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: cluster.find("Deployment", "chat-proxy"))
        waiting = {"reason": "ErrImagePull", "message": "no such image"}
        owner = cluster.find("Deployment", "chat-proxy")["metadata"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "chat-proxy-1",
                "namespace": "default",
                "labels": owner["labels"],
                "ownerReferences": [
                    {"kind": "Deployment", "name": owner["name"], "uid": owner["uid"]}
                ],
            },
            "status": {"containerStatuses": [{"state": {"waiting": waiting}}]},
        }
        await cluster.make(pod)
        why = "chat-proxy-1: ErrImagePull: no such image"
        wanted = f"the gateway is not ready: {why}"
        await cluster.until(
            lambda: (
                condition(cluster.find("ModelService", "chat"), "Available").get("message")
                == wanted
            )
        )
        shown = condition(cluster.find("ModelService", "chat"), "Degraded")
        assert (shown["reason"], shown["message"]) == ("PodTrouble", f"gateway: {why}")


async def test_nothing_is_written_when_nothing_changes(
    cluster: KubeEmulator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(around, "READ_AGAIN_S", math.inf)  # on any machine
    await cluster.make(chat())
    async with operator(cluster) as running:
        await cluster.until(lambda: ready(cluster))
        await rounds(running, 4)
        before = writes(cluster)
        lists = cluster.lists.copy()
        await rounds(running, 3)
        assert writes(cluster) == before
        assert cluster.lists["Pod"] == lists["Pod"]  # pools are reconciled only for their load


async def test_an_instance_leaves_once_it_holds_nothing(cluster: KubeEmulator, net: Net):
    """The instance is cordoned at the scheduler at once, and removed when its last request has
    ended.
    """
    peers = await workers(net, 2)
    await scheduler_client.set_cordon(net.address, "chat-decode-0", True)
    await holder(net, "r")
    await scheduler_client.set_cordon(net.address, "chat-decode-0", False)
    await cluster.make(chat(mode="Off", decode={"replicas": 2}))
    async with operator(cluster, scheduler=net.address) as running:
        await cluster.until(lambda: ready(cluster) and size(cluster) == 2)
        await resize(cluster, 1)
        await cluster.until(lambda: draining(cluster))
        await rounds(running, 6)
        assert size(cluster) == 2
        views = await scheduler_client.get_instances(net.address)
        assert {view.id: view.draining for view in views} == {
            "chat-prefill-0": False,
            "chat-decode-0": False,
            "chat-decode-1": True,
        }
        await peers["chat-prefill-0"].computed("r")
        await peers["chat-prefill-0"].released("r")
        await peers["chat-decode-1"].decoding("r")
        await rounds(running, 3)
        assert size(cluster) == 2
        await peers["chat-decode-1"].finished("r")
        await cluster.until(lambda: size(cluster) == 1 and not draining(cluster))
        assert cluster.find("Pod", "chat-decode-1") is None


async def test_a_drain_outlives_the_operator(cluster: KubeEmulator, net: Net):
    """The status has the start of the drain; a later operator continues it, and cancels it."""
    await workers(net, 2)
    await scheduler_client.set_cordon(net.address, "chat-decode-0", True)
    await holder(net, "r")
    await cluster.make(chat(mode="Off", decode={"replicas": 2}))
    async with operator(cluster, scheduler=net.address):
        await cluster.until(lambda: ready(cluster) and size(cluster) == 2)
        await resize(cluster, 1)
        await cluster.until(lambda: draining(cluster))
    before = draining(cluster)
    async with operator(cluster, scheduler=net.address, identity="b") as running:
        await rounds(running, 6)
        assert draining(cluster) == before and size(cluster) == 2
        await resize(cluster, 2)
        await cluster.until(lambda: not draining(cluster))
        await rounds(running, 3)
        views = await scheduler_client.get_instances(net.address)
        assert not [view.id for view in views if view.draining]


async def test_without_its_scheduler_nothing_leaves(cluster: KubeEmulator):
    await cluster.make(chat(mode="Off", decode={"replicas": 2}))
    async with operator(cluster) as running:
        await cluster.until(lambda: ready(cluster) and size(cluster) == 2)
        await resize(cluster, 1)
        await cluster.until(lambda: draining(cluster))
        await rounds(running, 6)
        assert size(cluster) == 2


async def test_parked_requests_wake_a_pool_that_sleeps(cluster: KubeEmulator, net: Net):
    zero = {"minReplicas": 0, "intervalSeconds": 1, "scaleToZero": {"enabled": True}}
    asleep = {"replicas": 0, "autoscaling": zero}
    await cluster.make(chat(prefill=asleep, decode=asleep))
    async with operator(cluster, scheduler=net.address) as running:
        await cluster.until(lambda: size(cluster) == 0)
        proxy = await net.proxy()
        parks = scheduler_pb2.ProxyLoad(parked_requests=3)
        await proxy.call.write(scheduler_pb2.ProxyMessage(load=parks))
        await cluster.until(lambda: size(cluster) == 1 and size(cluster, "chat-prefill") == 1)
        await cluster.until(lambda: why(cluster) == "3 parked requests")
        scale = "/apis/millrace.dev/v1alpha1/namespaces/default/decodepools/chat-decode/scale"
        assert ("PATCH", scale, "millrace-autoscaler") in cluster.writes
        assert total(running, "millrace_operator_scale_changes_total", direction="up") >= 2


async def test_prompts_that_wait_at_mixed_instances_make_their_pool_grow(
    cluster: KubeEmulator, net: Net
):
    """Puts 4 s of prompts each at the one instance: 12 s of backlog, with a target of 4 s per
    instance.
    """
    await net.worker("chat-decode-0", role="mixed", kv_pages=1000)
    await holder(net, "a", "b", "c", prompt_tokens=4000)
    at_once = {"intervalSeconds": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}
    pool = {"role": "mixed", "gpus": 0, "autoscaling": at_once}
    redis = {"secretRef": {"name": "redis"}}
    await cluster.make(service("chat", prefill=None, decode=pool, redis=redis))
    async with operator(cluster, scheduler=net.address):
        await cluster.until(lambda: size(cluster) == 3)
        await cluster.until(lambda: why(cluster).startswith("backlog of"))
        await cluster.until(lambda: ready(cluster))
        assert not cluster.all("PrefillGroup")


async def test_errors_are_got_over_without_haste(cluster: KubeEmulator):
    """Every failure is retried after growing waits; a Retry-After of one second is respected."""
    faults = [
        Fault(409, times=4),
        Fault(500, times=4),
        Fault(429, times=1, headers={"Retry-After": "1"}),
    ]
    cluster.faults += faults
    await cluster.make(chat())
    started_s = asyncio.get_running_loop().time()
    async with operator(cluster) as running:
        await cluster.until(lambda: ready(cluster))
        assert asyncio.get_running_loop().time() - started_s >= 1.0
        for fault in faults:
            assert fault.times == 0
            name = "millrace_operator_api_errors_total"
            assert total(running, name, status=str(fault.status)) == fault.hits


async def test_what_changes_while_watches_expire_is_not_missed(cluster: KubeEmulator):
    await cluster.make(chat(mode="Off"))
    async with operator(cluster):
        await cluster.until(lambda: ready(cluster))
        cluster.compact()
        await resize(cluster, 3)
        await cluster.until(lambda: size(cluster) == 3)
        cluster.compact()
        await cluster.remove("Deployment", "chat-proxy")
        await cluster.until(lambda: cluster.find("Deployment", "chat-proxy"))
        cluster.compact()
        await cluster.make(chat(name="next", mode="Off"))
        await cluster.until(lambda: ready(cluster, "next"))
        assert cluster.expired >= 3


@pytest.mark.parametrize("status", [403, 422])  # a quota, or the object itself
async def test_what_is_refused_is_told_and_tried_again_slowly(cluster: KubeEmulator, status: int):
    refusal = Fault(
        status, times=10_000, matches=lambda r: "statefulsets/chat-decode" in r.url.path
    )
    cluster.faults.append(refusal)
    await cluster.make(chat())
    async with operator(cluster) as running:
        await cluster.until(lambda: _degraded(cluster, "DecodePool", "chat-decode"))
        await cluster.until(lambda: _degraded(cluster, "ModelService", "chat"))
        told = condition(cluster.find("DecodePool", "chat-decode"), "Degraded")
        assert told["reason"] == "Refused" and f"injected {status}" in told["message"]
        await cluster.until(
            lambda: warned(cluster, "Refused") == {("chat-decode", told["message"])}
        )
        await rounds(running, 6)
        assert refusal.hits < 20
        cluster.faults.clear()
        await cluster.until(lambda: ready(cluster))
        assert not _degraded(cluster, "DecodePool", "chat-decode")


async def test_a_service_whose_first_child_is_refused_is_degraded(cluster: KubeEmulator):
    """Also in the column Phase of `kubectl get ms`."""
    cluster.faults.append(Fault(403, times=10_000, matches=lambda r: "/configmaps/" in r.url.path))
    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: _degraded(cluster, "ModelService", "chat"))
        assert cluster.find("ModelService", "chat")["status"]["phase"] == "Degraded"
        assert {name for name, _ in warned(cluster, "Refused")} == {"chat"}
        cluster.faults.clear()
        await cluster.until(lambda: ready(cluster))
        await cluster.until(
            lambda: cluster.find("ModelService", "chat")["status"]["phase"] == "Ready"
        )


async def test_a_spec_that_does_not_fit_the_models_is_told(cluster: KubeEmulator):
    """The API server may have accepted it before an upgrade of the CRDs; the emulator does not
    check.
    """
    wrong = chat()
    wrong["spec"]["gateway"] = {"port": 0}
    await cluster.make(wrong)
    await cluster.make(pool("DecodePool", "own", drain={"timeoutSeconds": -1}))
    messages = {
        ("ModelService", "chat"): "spec.gateway.port is 0; it must be an integer from 1 to 65535",
        ("DecodePool", "own"): (
            "spec.drain.timeoutSeconds is -1; it must be an integer from 0 to 86400"
        ),
    }
    async with operator(cluster):
        for key, message in messages.items():
            await cluster.until(lambda key=key: _degraded(cluster, *key))
            told = condition(cluster.find(*key), "Degraded")
            assert (told["reason"], told["message"]) == ("InvalidSpec", message)
            assert (key[1], message) in warned(cluster, "InvalidSpec")
        await cluster.edit("ModelService", "chat", lambda obj: obj["spec"].pop("gateway"))
        await cluster.until(lambda: ready(cluster))


@pytest.mark.parametrize("spec", [{}, {"serviceRef": {}}, {"serviceRef": "chat"}], ids=str)
async def test_a_pool_that_names_no_service_keeps_no_other_from_being_served(
    cluster: KubeEmulator, spec: Object
):
    """A CRD of another version, or one that somebody edited, has accepted it."""
    await cluster.make({**pool("DecodePool", "odd"), "spec": spec})
    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: ready(cluster) and _degraded(cluster, "DecodePool", "odd"))
        told = condition(cluster.find("DecodePool", "odd"), "Degraded")
        assert told["reason"] == "InvalidSpec" and "serviceRef" in told["message"]


def _degraded(cluster: KubeEmulator, kind: str, name: str) -> bool:
    return condition(cluster.find(kind, name), "Degraded").get("status") == "True"


async def test_what_belongs_to_others_is_left_alone(cluster: KubeEmulator):
    theirs: Any = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chat-config"}}
    await cluster.make({**theirs, "data": {"mine": "yes"}})
    await cluster.make(chat())
    async with operator(cluster):
        await cluster.until(lambda: _degraded(cluster, "ModelService", "chat"))
        message = condition(cluster.find("ModelService", "chat"), "Degraded")["message"]
        assert message == "ConfigMap chat-config exists and is not the operator's"
        assert cluster.find("ConfigMap", "chat-config")["data"] == {"mine": "yes"}


async def test_operators_take_turns(cluster: KubeEmulator):
    """A waiting operator writes nothing; it takes over at once when the leader stops."""
    async with contextlib.AsyncExitStack() as both:
        async with operator(cluster, identity="a") as first:
            await cluster.until(lambda: first.election.leading)
            second = await both.enter_async_context(operator(cluster, identity="b"))
            await cluster.make(chat())
            await cluster.until(lambda: ready(cluster) and second.ready())
            assert not second.election.leading and total(second, ROUNDS) == 0
            assert lease(cluster)["holderIdentity"] == "a"
        await cluster.until(lambda: second.election.leading)  # not when the lease expires
        assert lease(cluster)["holderIdentity"] == "b" and lease(cluster)["leaseTransitions"] == 1
        await cluster.make(chat(name="next"))
        await cluster.until(lambda: ready(cluster, "next"))
    assert lease(cluster)["holderIdentity"] == ""


async def test_without_the_right_to_watch_it_ends(cluster: KubeEmulator):
    """Releases the lease to another candidate."""
    cluster.faults.append(Fault(403, times=9, matches=lambda r: "/v1/pods" in r.url.path))
    with pytest.raises(Exception, match="injected 403"):
        async with operator(cluster) as running:
            await running.ended.wait()
    assert lease(cluster)["holderIdentity"] == ""


async def test_who_loses_the_lease_ends(cluster: KubeEmulator):
    with pytest.raises(LeaseLost):
        async with operator(cluster) as running:
            await cluster.until(lambda: running.election.leading)
            await cluster.edit(
                "Lease", "millrace-operator", lambda o: o["spec"].update(holderIdentity="thief")
            )
            await running.ended.wait()
    assert lease(cluster)["holderIdentity"] == "thief"
