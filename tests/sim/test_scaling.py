"""Autoscaling in whole simulations: start-up delay, draining, limits."""

from __future__ import annotations

import pytest

from millrace.core.autoscale.rules import AutoscaleConfig, DecodeTargets, Direction, PrefillTargets
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.sim.cluster.spec import AutoscalePlan, Failure
from millrace.sim.results.timeline import Timeline
from support.simulation import Run, planned, prefill_s, toy_spec

QUICK = {
    "up": Direction(max_step=4, period_s=1.0),
    "down": Direction(window_s=5.0, max_step=4, period_s=1.0, tolerance=0.2),
}


def plan(**more) -> AutoscalePlan:
    fields = {
        "prefill": AutoscaleConfig(targets=(PrefillTargets(backlog_s=0.5),), **QUICK),
        "interval_s": 1.0,
        "start_s": 3.0,
        **more,
    }
    return AutoscalePlan(**fields)


def config() -> SchedulerConfig:
    return SchedulerConfig(max_queue_requests=10**6, max_queue_s=1e9, tasks_ahead=1)


def burst(count: int = 120, tokens: int = 8000) -> list:
    """Returns far more work at once than one instance does in the time, then a trickle."""
    return [planned(i, i * 0.01, tokens) for i in range(count)] + [
        planned(count + i, 40.0 + i, 100) for i in range(30)
    ]


def longest_s(run: Run) -> float:
    return max(record.ttft_s for record in run.records.values())


def test_a_backlog_brings_instances_after_their_start_up():
    timeline = Timeline()
    run = Run(toy_spec(config(), autoscale=plan()), burst(), timeline=timeline)
    fixed = Run(toy_spec(config()), burst())
    first = run.counters.scale_events[0]
    assert (first.at_s, first.pool, first.instances) == (1.0, "prefill", 1)
    assert first.target > 1
    assert longest_s(run) < 0.6 * longest_s(fixed)
    new = [block.start_s for block in timeline.blocks if block.instance_id == "p1"]
    assert min(new) >= first.at_s + 3.0


def test_too_many_are_drained_and_lose_no_request():
    run = Run(toy_spec(config(), autoscale=plan()), burst())
    assert not any(record.error for record in run.records.values())
    targets = [event.target for event in run.counters.scale_events]
    assert max(targets) <= 8 and targets[-1] == 1
    alive = run.simulation.machine.cluster.instances
    assert sum(instance.card.role == "prefill" for instance in alive.values()) == 1
    # Instances that left cost nothing more; new instances cost from the wish on.
    peak = max(targets)
    assert run.counters.instance_seconds["prefill"] < peak * run.counters.duration_s


def test_instances_that_still_start_are_given_up_first():
    timeline = Timeline()
    spec = toy_spec(config(), autoscale=plan(start_s=60.0))
    run = Run(spec, burst(), timeline=timeline)
    targets = [event.target for event in run.counters.scale_events]
    assert max(targets) > 1 and targets[-1] == 1
    assert not any(record.error for record in run.records.values())
    assert {b.instance_id for b in timeline.blocks if b.kind == "prefill"} == {"p0"}


def test_decode_follows_its_memory():
    spec = toy_spec(
        config(),
        prefill=4,
        decode_kv_tokens=60_000,
        autoscale=plan(prefill=None, decode=AutoscaleConfig(targets=(DecodeTargets(),), **QUICK)),
    )
    run = Run(spec, [planned(i, i * 0.05, 3000, 400) for i in range(200)])
    assert {event.pool for event in run.counters.scale_events} == {"decode"}
    assert max(event.target for event in run.counters.scale_events) > 1
    assert not any(record.error for record in run.records.values())


def test_mixed_pools_scale_too():
    spec = toy_spec(
        config(),
        prefill=0,
        decode=0,
        mixed=1,
        packing=PackingConfig(t_target_s=0.05),
        control_s=5e-4,
        autoscale=plan(
            prefill=None,
            mixed=AutoscaleConfig(
                targets=(PrefillTargets(backlog_s=0.5), DecodeTargets()), **QUICK
            ),
        ),
    )
    run = Run(spec, burst())
    assert max(event.target for event in run.counters.scale_events) > 1
    assert not any(record.error for record in run.records.values())


def test_instances_that_die_while_they_drain_do_not_confuse_it():
    failures = tuple(
        Failure(at_s=at_s, instance_id="p0", down_s=0.5) for at_s in (12.0, 14.0, 16.0, 18.0)
    )
    run = Run(toy_spec(config(), prefill=4, autoscale=plan(), failures=failures), burst())
    assert sorted(run.records) == list(range(150))
    assert run.counters.instance_failures >= 1


def test_reports_under_way_count_as_starting():
    run = Run(toy_spec(config(), control_s=0.4, autoscale=plan(start_s=1.0)), burst())
    assert max(event.instances for event in run.counters.scale_events) <= 8


@pytest.mark.parametrize("fields", [{"interval_s": 0.0}, {"start_s": -1.0}])
def test_times_out_of_range_are_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        AutoscalePlan(**fields)


def test_work_is_what_one_instance_would_take():
    assert prefill_s(8000) * 120 > 30.0, "the burst is a burst"
