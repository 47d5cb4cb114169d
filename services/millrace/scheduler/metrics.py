"""What the scheduler counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from millrace.core.autoscale.load import FleetLoad
from millrace.core.scheduler.effects import Record, Refuse
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.recorder import Recorder
from millrace.telemetry.metrics import Registry

#: Seconds of one step of the machine, from a heartbeat to a round over a large fleet.
STEP_BUCKETS = (*(1e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4), *(2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2))

#: A pool's signals that are gauges: field of `PoolLoad`, name, documentation.
_POOL = (
    ("draining", "draining_instances", "instances that take no new work"),
    ("active_requests", "active_requests", "requests placed in the pool, or waiting for it"),
    ("backlog_s", "backlog_seconds", "predicted prefill not yet computed"),
    ("arriving", "arriving_instances", "so many would be busy with the prefill that arrives"),
    ("ttft_slo_ratio", "ttft_slo_ratio", "mean TTFT over its objective, worst class"),
    ("kv_utilisation", "kv_utilisation_ratio", "KV pages held or waited for, over all"),
    ("tbt_slo_ratio", "tbt_slo_ratio", "mean TBT over its objective, worst class"),
)


class SchedulerMetrics:
    """Gauges read the machine when they are scraped; counters are told."""

    def __init__(
        self,
        registry: Registry,
        machine: Machine,
        recorder: Recorder,
        load: Callable[[], FleetLoad],
    ) -> None:
        self.step_s = registry.histogram(
            "millrace_scheduler_step_seconds",
            "time to decide on one event",
            buckets=STEP_BUCKETS,
        )
        self._ended = registry.counter(
            "millrace_scheduler_ended_requests_total", "requests by their end state", ["state"]
        )
        self._refused = registry.counter(
            "millrace_scheduler_refused_requests_total", "requests not accepted", ["code"]
        )
        self.sent = registry.counter(
            "millrace_scheduler_sent_messages_total", "messages to peers", ["kind"]
        )
        self._instances = registry.gauge(
            "millrace_scheduler_fleet_instances", "instances that take new work", ["role"]
        )
        for role in ("prefill", "decode", "mixed", "kvp"):
            taking = partial(_taking_work, machine, role)
            self._instances.labels(role).set_function(taking)
        config = machine.config
        self._policy = registry.gauge(
            "millrace_scheduler_policy_info",
            "1 for how the scheduler decides now",
            ["policy", "preemption", "planner"],
        )
        self._decides = {"preemption": config.preemption, "planner": config.planner}
        self._policy.labels(policy=config.policy, **self._decides).set(1)
        self._changes = registry.counter(
            "millrace_scheduler_policy_changes_total", "changes of the policy", ["policy"]
        )
        for name, documentation, value in (
            (
                "spread_requests",
                "requests whose KV several instances hold",
                lambda: sum(bool(one.shards) for one in machine.requests.values()),
            ),
            ("queued_requests", "requests no prefill instance has", lambda: machine.queued),
            ("queued_seconds", "predicted prefill of those", lambda: machine.queued_s),
            ("live_requests", "requests that have not ended", lambda: len(machine.requests)),
            ("ignored_messages", "late, doubled or unknown news", lambda: machine.ignored),
            (
                "least_gain_ratio",
                "gain a larger group must bring",
                lambda: machine.improvement_rate,
            ),
            ("scheduling_rounds", "rounds so far: at arrivals and ends", lambda: machine.rounds),
            ("prefill_commands", "commands to prefill so far", lambda: machine.commands),
            ("preempted_tasks", "told to yield while they ran", lambda: machine.preemptions),
            ("stalled_requests", "taken from prefill that stood still", lambda: machine.stalled),
            ("unreleased_requests", "never released by workers", lambda: machine.release_timeouts),
            ("unwritten_requests", "states the store lacks so far", lambda: recorder.buffered),
        ):
            registry.gauge_function(f"millrace_scheduler_{name}", documentation, value)
        registry.gauges_by(
            "role",
            {f"millrace_scheduler_pool_{name}": documentation for _, name, documentation in _POOL},
            lambda: _signals(load()),
        )

    def ended(self, record: Record) -> None:
        self._ended.labels(record.state.value).inc()

    def policy_changed(self, policy: str) -> None:
        """Another policy is in force."""
        self._policy.clear()
        self._policy.labels(policy=policy, **self._decides).set(1)
        self._changes.labels(policy).inc()

    def refused(self, effect: Refuse) -> None:
        self._refused.labels(effect.code).inc()


def _signals(load: FleetLoad) -> Mapping[str, Mapping[str, float | None]]:
    return {
        role: {f"millrace_scheduler_pool_{name}": getattr(pool, field) for field, name, _ in _POOL}
        for role, pool in load.pools.items()
    }


def _taking_work(machine: Machine, role: str) -> int:
    instances = machine.cluster.instances.values()
    return sum(one.card.role == role and not one.draining for one in instances)
