"""The operator's own metrics, which `millrace.telemetry.metrics` serves at /metrics."""

from __future__ import annotations

from collections.abc import Callable

from millrace.telemetry.metrics import Registry


class OperatorMetrics:
    """Labels: `kind` of an object; `result` done | error | refused; `pool` as namespace/name."""

    def __init__(self, registry: Registry) -> None:
        self.reconciles = registry.counter(
            "millrace_operator_reconcile_rounds_total",
            "Reconciliations of an object, by result",
            ["kind", "result"],
        )
        self.reconcile_seconds = registry.histogram(
            "millrace_operator_reconcile_seconds", "Duration of a reconciliation", ["kind"]
        )
        self.recommended = registry.gauge(
            "millrace_operator_recommended_instances",
            "Instances that the autoscaler recommends for the pool",
            ["kind", "pool"],
        )
        self.scalings = registry.counter(
            "millrace_operator_scale_changes_total",
            "Changes of the pool's size by the autoscaler",
            ["kind", "pool", "direction"],
        )
        self.api_errors = registry.counter(
            "millrace_operator_api_errors_total",
            "Answers of the API server except 2xx and 404; status 0: no answer",
            ["verb", "status"],
        )
        self.load_errors = registry.counter(
            "millrace_operator_scheduler_errors_total", "Calls that a scheduler did not answer"
        )
        self.leading = registry.gauge(
            "millrace_operator_leader_info", "1 for the operator that acts, 0 for a standby"
        )
        self._registry = registry

    def count_call(self, verb: str, status: int) -> None:
        """Counts an answer; for `Kube`'s `on_call`."""
        if status != 404 and not 200 <= status < 300:
            self.api_errors.labels(verb, str(status)).inc()

    def watch_queue(self, waiting: Callable[[], int]) -> None:
        self._registry.gauge_function(
            "millrace_operator_waiting_tasks",
            "Objects that are due and wait for reconciliation",
            waiting,
        )

    def forget(self, kind: str, pool: str) -> None:
        """Removes the series of a deleted pool."""
        self.recommended.remove(kind, pool)
        for direction in ("up", "down"):
            self.scalings.remove(kind, pool, direction)
