"""What the operator observes around a pool."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.telemetry.metrics import Registry
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.run.cluster import Cluster, Parts
from millrace_operator.run.kube import Kube
from millrace_operator.run.load import Schedulers
from millrace_operator.run.queue import Key
from millrace_operator.run.runner import Runner
from millrace_operator.run.scaler import Scaler
from millrace_operator.spec import Defaults, parse_pool
from support.custom_objects import service
from support.kube_emulator import KubeEmulator, configuration_of
from support.scheduler_peers import Net

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
    metrics, schedulers = OperatorMetrics(Registry()), Schedulers()
    kube = Kube(configuration_of(cluster))
    observing = Cluster(
        Parts(
            kube=kube,
            schedulers=schedulers,
            scaler=Scaler(schedulers),
            metrics=metrics,
            leads=lambda: True,
            identity="a",
            address=lambda namespace, name: net.address,
        )
    )
    observing.has_leader_worker_sets = lws
    images = {role: f"millrace-{role}:1" for role in ("proxy", "scheduler", "prefill", "decode")}
    runner = Runner(observing, Defaults(images=images), metrics)
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
