"""One operator's parts, without kopf and the queue: a test runs each pass."""

from __future__ import annotations

from collections.abc import Callable

from millrace.telemetry.metrics import Registry
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.run.cluster import Cluster, Parts
from millrace_operator.run.kube import Kube
from millrace_operator.run.load import Schedulers
from millrace_operator.run.runner import Runner
from millrace_operator.run.scaler import Scaler
from millrace_operator.spec import Defaults

ROLES = ("proxy", "scheduler", "prefill", "decode")


def cluster_and_runner(
    kube: Kube, address: str, **clocks: Callable[[], float]
) -> tuple[Cluster, Runner]:
    """Returns what observes and changes the API server's objects, and what runs passes over it.

    `address`: that of every scheduler. `clocks`: `clock` and `wall` of Parts.
    """
    metrics, schedulers = OperatorMetrics(Registry()), Schedulers()
    parts = Parts(
        kube=kube,
        schedulers=schedulers,
        scaler=Scaler(schedulers),
        metrics=metrics,
        leads=lambda: True,
        identity="a",
        address=lambda namespace, name: address,
        **clocks,
    )
    images = {role: f"millrace-{role}:1" for role in ROLES}
    cluster = Cluster(parts)
    return cluster, Runner(cluster, Defaults(images=images), metrics)
