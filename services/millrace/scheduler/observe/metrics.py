"""The scheduler's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from millrace.core.autoscale.load import FleetLoad
from millrace.core.scheduler.effects import Record, Refuse
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.recorder import Recorder
from millrace.telemetry.metrics import Registry

#: Buckets, in seconds, of one step of the machine: from a heartbeat to a round over a large fleet.
STEP_BUCKETS = (*(1e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4), *(2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2))

#: The gauges of a pool's signals: field of `PoolLoad`, metric name, help text.
_POOL = (
    ("draining", "draining_instances", "instances that take no new work"),
    ("active_requests", "active_requests", "requests placed in the pool or waiting for it"),
    ("backlog_s", "backlog_seconds", "predicted prefill not yet computed"),
    ("arriving", "arriving_instances", "instances that the arriving prefill would keep busy"),
    ("ttft_slo_ratio", "ttft_slo_ratio", "mean TTFT over its objective, of the worst class"),
    ("kv_utilisation", "kv_utilisation_ratio", "KV pages in use or waited for, over all KV pages"),
    ("tbt_slo_ratio", "tbt_slo_ratio", "mean TBT over its objective, of the worst class"),
)


class SchedulerMetrics:
    """The metrics. Gauges read the machine at every scrape; the loop increments the counters."""

    def __init__(
        self,
        registry: Registry,
        machine: Machine,
        recorder: Recorder,
        load: Callable[[], FleetLoad],
        epoch: int,
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
        leader = registry.gauge(
            "millrace_scheduler_leader_info",
            "1 where this scheduler leads, with its epoch; absent where it stands by",
            ["epoch"],
        )
        leader.labels(str(epoch)).set(1)
        self.takeover_s = registry.gauge(
            "millrace_scheduler_takeover_seconds",
            "time from the lease to the first decision, for a leader that has taken over",
        )
        self.adopted = registry.counter(
            "millrace_scheduler_adopted_requests_total", "requests taken over from another leader"
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
            "always 1; the labels give the scheduler's settings in force",
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
                "requests whose KV is spread over several instances",
                lambda: sum(bool(one.shards) for one in machine.requests.values()),
            ),
            (
                "queued_requests",
                "requests that wait for a prefill instance",
                lambda: machine.queued,
            ),
            (
                "queued_seconds",
                "predicted prefill time of queued requests",
                lambda: machine.queued_s,
            ),
            (
                "isolated_requests",
                "requests that may only run alone, after instances died with them",
                lambda: machine.suspects.isolated,
            ),
            (
                "open_breaker_instances",
                "instances that get no new request, or one as a probe, because of their errors",
                lambda: machine.breakers.open,
            ),
            (
                "slow_instances",
                "prefill instances that get no new prompt, or one as a probe, because they lag",
                lambda: len(machine.slow_instances.names()),
            ),
            ("live_requests", "requests that have not ended", lambda: len(machine.requests)),
            (
                "least_gain_ratio",
                "share by which a larger SP group must cut the TTFT",
                lambda: machine.improvement_rate,
            ),
            (
                "unwritten_requests",
                "requests whose state is not written yet",
                lambda: recorder.buffered,
            ),
        ):
            registry.gauge_function(f"millrace_scheduler_{name}", documentation, value)
        for name, documentation, value in (
            ("ignored_messages", "late, duplicate or unknown messages", lambda: machine.ignored),
            ("scheduling_rounds", "scheduling rounds at arrivals and ends", lambda: machine.rounds),
            ("prefill_commands", "prefill commands sent", lambda: machine.commands),
            ("preempted_tasks", "tasks preempted while they ran", lambda: machine.preemptions),
            (
                "stalled_requests",
                "requests planned again because prefill made no progress",
                lambda: machine.stalled,
            ),
            (
                "quarantined_requests",
                "requests that ended because instances died of them",
                lambda: machine.suspects.quarantined,
            ),
            (
                "breaker_openings",
                "times that new requests were kept from an instance because of its errors",
                lambda: machine.breakers.opened,
            ),
            (
                "unreleased_requests",
                "requests that workers did not release in time",
                lambda: machine.release_timeouts,
            ),
        ):
            registry.counter_function(f"millrace_scheduler_{name}_total", documentation, value)
        registry.gauges_by(
            "role",
            {f"millrace_scheduler_pool_{name}": documentation for _, name, documentation in _POOL},
            lambda: _signals(load()),
        )

    def ended(self, record: Record) -> None:
        self._ended.labels(record.state.value).inc()

    def policy_changed(self, policy: str) -> None:
        """Counts a change of the policy."""
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
