"""The improvement rate where it decides whether a request is in time."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.effects import RunPrefill
from millrace.core.scheduler.events import ImprovementRateChanged
from support.core_events import Bench, instance, of

#: A group of two is 20 % faster: less than the rate of 0.3 asks for.
LATENCY = SpLatency(by_sp={1: Latency(b=1e-3), 2: Latency(b=0.8e-3)})


def bench(rate: float = -1.0, table: str = "", planner: str = "cdsp") -> Bench:
    config = SchedulerConfig(
        policy="fcfs", planner=planner, improvement_rate=rate, improvement_rates=table
    )
    fleet = [instance(name, pages=1000, latency=LATENCY) for name in ("p0", "p1")]
    return Bench(*fleet, instance("d0", pages=1000), config=config)


def members(made: Bench, name: str = "a", **objectives) -> int:
    """Submits a prompt of 1 s, or 0.8 s on both instances; returns the size of its group."""
    sent = of(RunPrefill, made.submit(name, 1000, 10, **objectives))
    return len(sent[0].chunks[-1].instance_ids)


@pytest.mark.parametrize("planner", ["auto", "cdsp", "single_chunk"])
@pytest.mark.parametrize(
    ("objectives", "size"),
    [
        ({}, 1),  # nobody asked for it at any time
        ({"ttft_s": 1.1}, 1),  # in time alone
        ({"ttft_s": 0.9}, 2),  # in time with the other's help only
        ({"ttft_s": 0.7}, 1),  # late in any case
        ({"e2e_s": 0.9}, 2),  # nothing is known of the steps after it
    ],
)
def test_a_larger_group_is_worth_it_where_it_saves_an_objective(planner, objectives, size):
    assert members(bench(planner=planner), **objectives) == size


@pytest.mark.parametrize(("rate", "table"), [(0.3, ""), (-1.0, "0.5:0.3,2:0.3")])
def test_a_rate_or_table_that_is_set_holds_for_all(rate, table):
    assert members(bench(rate, table), ttft_s=0.9) == 1


def test_a_rate_that_is_set_live_holds_for_all_too():
    made = bench()
    made.step(ImprovementRateChanged(rate=0.3))
    assert members(made, ttft_s=0.9) == 1


def test_the_queue_counts():
    made = bench()
    assert members(made, "a") == 1  # 1 s on one of the two
    assert members(made, "b", ttft_s=1.1) == 1  # at the other one at once
    made = bench()
    made.submit("x", 100, 10)  # 0.1 s on one of the two: the group is late by then
    assert members(made, "a", ttft_s=0.85) == 1


@pytest.mark.parametrize(("ttft_s", "size"), [(1.1, 1), (0.7, 2), (0.5, 4)])
def test_no_larger_group_is_taken_than_the_objective_asks_for(ttft_s, size):
    """Under a load at which a larger group must gain a half; two gain 0.4, four another 0.25."""
    latency = SpLatency(by_sp={1: Latency(b=1e-3), 2: Latency(b=0.6e-3), 4: Latency(b=0.45e-3)})
    config = SchedulerConfig(policy="fcfs", planner="cdsp")
    fleet = [instance(f"p{number}", pages=10_000, latency=latency) for number in range(4)]
    made = Bench(*fleet, instance("d0", pages=100_000), config=config)
    for number in range(35):  # 4 s of work for one of the four in every second
        made.tick(0.9)
        [sent, *_] = of(RunPrefill, made.submit(f"r{number}", 4000, 10))
        leader, *others = sent.chunks[-1].instance_ids
        made.serve(f"r{number}", leader)
        for other in others:
            made.released(other, f"r{number}")
    made.tick(1.0)
    assert made.machine.improvement_rate >= 0.5
    assert members(made, ttft_s=ttft_s) == size
