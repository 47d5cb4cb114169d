"""One pass over one object: observe, decide (`reconcile`), carry out; and the time of the next
pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace_operator.metrics import OperatorMetrics
from millrace_operator.observed import Object
from millrace_operator.reconcile.actions import Action, SetStatus
from millrace_operator.reconcile.conditions import Condition, updated
from millrace_operator.reconcile.reconcile import reconcile_pool, reconcile_service
from millrace_operator.run.cluster import Cluster, OwnerGone
from millrace_operator.run.kube import KubeRefused
from millrace_operator.run.queue import Key
from millrace_operator.spec import Defaults

#: Seconds between passes. Events report a service's changes; a pass after this time finds missed
#: changes.
SERVICE_S = 30.0

#: Seconds between passes while an instance drains, to ask what it still holds.
DRAIN_S = 2.0


class Runner:
    """Runs passes; the work queue calls `reconcile`."""

    def __init__(self, cluster: Cluster, defaults: Defaults, metrics: OperatorMetrics) -> None:
        self._cluster = cluster
        self._defaults = defaults
        self._metrics = metrics

    async def reconcile(self, key: Key) -> float | None:
        """Returns the seconds until the next pass; None when the object is gone. Raises any
        failure.
        """
        result = "error"
        try:
            with self._metrics.reconcile_seconds.labels(key.kind).time():
                again_s = await self._look(key)
            result = "done"
        except KubeRefused:
            result = "refused"
            raise
        finally:
            self._metrics.reconciles.labels(key.kind, result).inc()
        return again_s

    async def _look(self, key: Key) -> float | None:
        obj = await self._cluster.get(key)
        if obj is None:
            return None
        actions: Sequence[Action]
        if key.kind == "ModelService":
            service = await self._cluster.observe_service(obj)
            actions, again_s = reconcile_service(obj, service, self._defaults), SERVICE_S
        else:
            pool = await self._cluster.observe_pool(obj)
            actions = reconcile_pool(obj, pool, self._defaults)
            again_s = float(obj["spec"]["autoscaling"]["intervalSeconds"])
        try:
            await self._cluster.carry_out(obj, actions)
        except KubeRefused as error:
            status = _degraded(obj, actions, str(error), self._cluster.now_s())
            await self._cluster.carry_out(obj, [SetStatus(status=status)])
            raise
        except OwnerGone:
            return 0.0  # the next pass forgets it, or finds another object of its name
        return min(again_s, DRAIN_S) if _status(obj, actions).get("draining") else again_s


def _status(obj: Object, actions: Sequence[Action]) -> Mapping[str, Any]:
    """Returns the status after the actions."""
    wanted = [action.status for action in actions if isinstance(action, SetStatus)]
    status: Mapping[str, Any] = wanted[-1] if wanted else obj.get("status", {})
    return status


def _degraded(obj: Object, actions: Sequence[Action], message: str, now_s: float) -> dict[str, Any]:
    """Returns the status with the condition that the API server refuses a change."""
    status = _status(obj, actions)
    [condition] = updated(
        obj.get("status", {}),
        [Condition("Degraded", True, "Refused", message)],
        generation=obj["metadata"]["generation"],
        now_s=now_s,
    )
    others = [entry for entry in status.get("conditions", []) if entry["type"] != "Degraded"]
    return {**status, "conditions": [*others, condition]}
