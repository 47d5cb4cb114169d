"""One pass over one object: observe, decide (`reconcile`), carry out; and the time of the next
pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.errors import MillraceError
from millrace_operator.metrics import OperatorMetrics
from millrace_operator.observed import Object
from millrace_operator.reconcile.actions import Action, Report, SetStatus
from millrace_operator.reconcile.conditions import Condition, updated
from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.reconcile.service import reconcile_service
from millrace_operator.run.children import OwnerGone
from millrace_operator.run.cluster import Cluster
from millrace_operator.run.kube import KubeRefused
from millrace_operator.run.queue import Key
from millrace_operator.spec import Defaults, SpecError, parse_pool, parse_service

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
        try:
            actions, again_s = await self._decide(obj)
        except SpecError as error:
            actions, again_s = self._degraded(obj, (), "InvalidSpec", error), SERVICE_S
        try:
            await self._cluster.carry_out(obj, actions)
        except KubeRefused as error:
            await self._cluster.carry_out(obj, self._degraded(obj, actions, "Refused", error))
            raise
        except OwnerGone:
            return 0.0  # the next pass forgets it, or finds another object of its name
        return min(again_s, DRAIN_S) if _status(obj, actions).get("draining") else again_s

    async def _decide(self, obj: Object) -> tuple[Sequence[Action], float]:
        """Returns the actions, and the seconds until the next pass. Raises SpecError."""
        if obj["kind"] == "ModelService":
            service = parse_service(obj)
            around = await self._cluster.observe_service(service)
            return reconcile_service(service, around, self._defaults), SERVICE_S
        pool = parse_pool(obj)
        observed = await self._cluster.observe_pool(pool)
        actions = reconcile_pool(pool, observed, self._defaults)
        return actions, float(pool.spec.autoscaling.interval_seconds)

    def _degraded(
        self, obj: Object, actions: Sequence[Action], reason: str, error: MillraceError
    ) -> Sequence[Action]:
        """Returns an Event, and the status after the actions, with the condition that the object is
        degraded.
        """
        status = _status(obj, actions)
        [condition] = updated(
            obj.get("status", {}),
            [Condition("Degraded", True, reason, str(error))],
            generation=obj["metadata"]["generation"],
            now_s=self._cluster.now_s(),
        )
        others = [entry for entry in status.get("conditions", []) if entry["type"] != "Degraded"]
        phase = {"phase": "Degraded"} if obj["kind"] == "ModelService" else {}
        return [
            Report(reason=reason, message=str(error), warning=True),
            SetStatus(status={**status, **phase, "conditions": [*others, condition]}),
        ]


def _status(obj: Object, actions: Sequence[Action]) -> Mapping[str, Any]:
    """Returns the status after the actions."""
    wanted = [action.status for action in actions if isinstance(action, SetStatus)]
    status: Mapping[str, Any] = wanted[-1] if wanted else obj.get("status", {})
    return status
