"""What the operator observes around a pool."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_operator.run.kube import Kube
from millrace_operator.run.queue import Key
from millrace_operator.run.runner import Runner
from millrace_operator.spec import parse_pool
from support.custom_objects import service
from support.kube_emulator import KubeEmulator, configuration_of
from support.scheduler_peers import Net
from support.single_passes import cluster_and_runner

POOL = Key("DecodePool", "default", "chat-decode")


@pytest.mark.parametrize(
    ("stages", "lws", "room"),
    [({}, False, 2 + 2), (own := {"stages": 3, "stagePods": "Own"}, False, 2), (own, True, 2)],
)
async def test_room_is_counted_in_instances(
    cluster: KubeEmulator, net: Net, stages: dict[str, Any], lws: bool, room: int
) -> None:
    """Two instances are there, and the quota has room for two more pods."""
    cluster.serve("LeaderWorkerSet")
    kube = Kube(configuration_of(cluster))
    observing, runner = cluster_and_runner(kube, net.address)
    observing.has_leader_worker_sets = lws
    await net.worker("d", role="decode")
    decode = {"replicas": 2, "gpus": 0, "autoscaling": {"mode": "Off"}, **stages}
    redis = {"secretRef": {"name": "redis"}}
    await cluster.make(service(redis=redis, prefill={"gpus": 0}, decode=decode))
    try:
        await runner.reconcile(Key("ModelService", "default", "chat"))
        for _ in range(3):
            await runner.reconcile(POOL)
        pods = sum(pod["metadata"]["name"].startswith("chat-decode") for pod in cluster.all("Pod"))
        quota = {"hard": {"pods": str(pods + 2)}, "used": {"pods": str(pods)}}
        meta = {"name": "most", "namespace": "default"}
        await cluster.make({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta})
        await cluster.edit("ResourceQuota", "most", lambda o: o.update(status=quota))
        observing.changed(POOL)
        pool = cluster.find("DecodePool", "chat-decode")
        assert pool is not None
        observed = await observing.observe_pool(parse_pool(pool))
        assert observed.metrics is not None
        assert observed.metrics.quota == room
    finally:
        await kube.close()


class Clocks:
    """The operator's monotonic clock and wall clock."""

    def __init__(self) -> None:
        self.now_s, self.ahead_s = 1000.0, 1.7e9

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s + self.ahead_s


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_step_of_the_wall_clock_neither_ends_nor_lengthens_a_drain(
    cluster: KubeEmulator, net: Net, step_s: float
) -> None:
    """Also where another operator, whose wall clock is an hour off, goes on with it."""
    clocks, kube = Clocks(), Kube(configuration_of(cluster))

    def operator() -> Runner:
        clock, wall = clocks.monotonic, clocks.wall
        return cluster_and_runner(kube, net.address, clock=clock, wall=wall)[1]

    async def drain() -> dict[str, Any]:
        await runner.reconcile(POOL)
        pool = cluster.find("DecodePool", "chat-decode")
        assert pool is not None
        [entry] = pool["status"]["draining"]
        return entry

    decode = {"replicas": 1, "gpus": 0, "autoscaling": {"mode": "Off"}}
    decode["drain"] = {"timeoutSeconds": 100, "onTimeout": "Wait"}
    redis = {"secretRef": {"name": "redis"}}
    await cluster.make(service(redis=redis, prefill={"gpus": 0}, decode=decode))
    try:
        runner = operator()
        await runner.reconcile(Key("ModelService", "default", "chat"))
        for _ in range(2):
            await runner.reconcile(POOL)
        await cluster.edit("DecodePool", "chat-decode", lambda o: o["spec"].update(replicas=0))
        await drain()
        clocks.ahead_s += step_s
        clocks.now_s += 60.0
        assert (await drain())["waitedSeconds"] == 60
        runner = operator()
        clocks.ahead_s += step_s
        clocks.now_s += 30.0
        assert "timedOut" not in await drain()
        clocks.now_s += 39.0
        assert "timedOut" not in await drain()
        clocks.now_s += 1.0
        assert (await drain())["timedOut"]
    finally:
        await kube.close()
