"""Workers that obey, under preemption, in groups and in batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.priority import POLICIES
from millrace.core.scheduler.effects import Order
from millrace.core.scheduler.planning import PLANNERS
from support.core_events import Bench, groups_of, instance, of
from support.prefill_fleet import Fleet
from support.priority import STATIC


def config(**more) -> SchedulerConfig:
    return SchedulerConfig(**{"policy": "edf", "preemption": "operator", **more})


def bench(count: int = 1, *, pages: int = 1000, **more) -> Bench:
    latency = groups_of(1, 2, 4)
    fleet = [instance(f"p{i}", pages=pages, latency=latency, node="n") for i in range(count)]
    return Bench(*fleet, instance("d0", pages=100_000, batch=1000), config=config(**more))


def finished_s(policy: str, arrivals, *, preemption: str = "operator", count: int = 1) -> Fleet:
    fleet = Fleet(
        bench(count, policy=policy, preemption=preemption, tasks_ahead=2),
        preemptive=preemption != "none",
    )
    fleet.serve(arrivals)
    return fleet


def test_a_suspended_one_waits_for_all_that_go_before_it() -> None:
    fleet = finished_s(
        "edf",
        [(0.0, "long", 1000, 9.0), (0.2, "a", 100, 1.0), (0.25, "b", 100, 0.5)],
    )
    assert fleet.computed_s == pytest.approx({"b": 0.35, "a": 0.4, "long": 1.2})
    assert fleet.commands() == [
        "submit long",
        "preempt long",
        "submit a",
        "preempt a",
        "submit b",
        "resume a",
        "resume long",
    ]


def test_workers_compute_a_batch_at_once() -> None:
    fleet = Fleet(bench(batch_tokens=1000, tasks_ahead=1), preemptive=True)
    fleet.serve(
        [(0.0, "first", 100, 1.0), (0.01, "a", 100, 5.0), (0.02, "b", 200, 6.0)],
    )
    assert fleet.commands() == ["submit first", "submit a+b"]
    assert fleet.computed_s == pytest.approx({"first": 0.1, "a": 0.4, "b": 0.4})
    assert len(of(Order, fleet.bench.all)) == 1


rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(
    rows,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(PLANNERS)),
    st.sampled_from(["none", "operator"]),
    st.sampled_from([0, 500]),
)
def test_workers_that_do_as_told_bring_everyone_to_an_end(
    given_rows, policy, planner, preemption, batch_tokens
) -> None:
    """Queues and running tasks are always as the machine expects; no work is lost or done twice."""
    one = bench(
        4,
        policy=policy,
        planner=planner,
        preemption=preemption,
        batch_tokens=batch_tokens,
        fixed_sp=2,
    )
    fleet = Fleet(one, preemptive=preemption != "none")
    arrivals = [
        (at / 10, f"r{i}", tokens * 100, slo / 10) for i, (at, tokens, slo) in enumerate(given_rows)
    ]
    fleet.serve(arrivals)
    assert set(fleet.computed_s) == {name for _, name, _, _ in arrivals}
    counts: dict[str, int] = {}
    for _, what, _ in fleet.log:
        counts[what] = counts.get(what, 0) + 1
    assert counts["submit"] == counts["finish"]
    preempted = counts.get("preempt", 0)
    assert preempted == counts.get("resume", 0) <= one.machine.preemptions
    if policy in STATIC:  # or an order may be taken back before it is carried out
        assert preempted == one.machine.preemptions
    if preemption == "none":
        assert "preempt" not in counts
