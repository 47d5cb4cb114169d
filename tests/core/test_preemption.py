"""Preemption through the machine: who yields, who goes on, and what remaining work counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core import events
from millrace.core.config import SchedulerConfig
from millrace.core.effects import Order, RunPrefill
from millrace.core.planning import PLANNERS
from millrace.core.priority import POLICIES
from support.core_events import Bench, groups_of, instance, of, queues
from support.prefill_fleet import Fleet, scripted


def config(**more) -> SchedulerConfig:
    return SchedulerConfig(**{"policy": "edf", "preemption": "operator", **more})


def bench(count: int = 1, *, pages: int = 1000, **more) -> Bench:
    latency = groups_of(1, 2, 4)
    fleet = [instance(f"p{i}", pages=pages, latency=latency, node="n") for i in range(count)]
    return Bench(*fleet, instance("d0", pages=100_000, batch=1000), config=config(**more))


def sent(found) -> list[str]:
    return [e.request_id for e in of(RunPrefill, found)]


# ---- dispatch limits


def test_with_preemption_only_what_goes_before_fills_the_slots() -> None:
    one = bench(tasks_ahead=2)
    one.submit("a", ttft_s=5.0)
    one.submit("b", ttft_s=6.0)
    assert sent(one.submit("behind", ttft_s=7.0)) == []
    assert sent(one.submit("between", ttft_s=5.5)) == ["between"]
    assert sent(one.submit("first", ttft_s=1.0)) == ["first"]
    assert sent(one.submit("third", ttft_s=5.2)) == []  # "first" and "a" go before it
    assert sent(one.computed("p0", "first")) == ["third"]


def test_without_preemption_what_runs_counts_too() -> None:
    one = bench(tasks_ahead=1, preemption="none")
    one.submit("a", ttft_s=5.0)
    assert sent(one.submit("first", ttft_s=1.0)) == []
    assert sent(one.computed("p0", "a")) == ["first"]


def test_without_preemption_the_running_one_is_never_ordered_away() -> None:
    one = bench(tasks_ahead=3, preemption="none")
    one.submit("a", ttft_s=5.0)
    one.submit("b", ttft_s=4.0)
    found = one.submit("first", ttft_s=1.0)
    assert queues(found) == {"p0": ["a", "first", "b"]}


# ---- who yields


def test_the_machine_orders_the_better_one_to_the_front_and_the_other_resumes() -> None:
    one = bench()
    one.submit("a", ttft_s=5.0)
    one.chunk_started("p0", "a")
    assert queues(one.submit("b", ttft_s=1.0)) == {"p0": ["b", "a"]}
    assert one.machine.preemptions == 1
    one.suspended("p0", "a", 0.01)
    one.chunk_started("p0", "b")
    found = one.computed("p0", "b")
    assert not of(Order, found)  # the next entry starts without a word
    (task,) = one.machine.cluster.instances["p0"].queue
    assert task.chosen and task.requests[0].id == "a"


def test_only_the_instance_that_is_shared_hears_of_it() -> None:
    one = scripted(
        bench(3),
        {100: [(100, (0, 1))], 200: [(200, (2,))], 10: [(10, (1,))]},
    )
    one.submit("pair", 100, ttft_s=5.0)
    one.submit("apart", 200, ttft_s=9.0)
    assert queues(one.submit("better", 10, ttft_s=1.0)) == {"p1": ["better", "pair"]}


def test_news_that_change_nothing_about_work_start_no_round() -> None:
    one = bench()
    one.submit("a", ttft_s=5.0)
    one.submit("b", ttft_s=1.0)
    before = one.machine.rounds
    one.chunk_started("p0", "b")
    one.suspended("p0", "b", 0.01)
    one.step(
        events.LoadReported(instance_id="p0", generation=1, free_pages=1, running=1, waiting=1)
    )
    one.decoding("d0", "b")
    assert one.machine.rounds == before


# ---- remaining work


def test_remaining_work_counts_each_stretch_once() -> None:
    one = bench()
    one.submit("a", 1000, ttft_s=9.0)  # 1 s
    a = one.machine.requests["a"]
    assert a.remaining_s(5.0) == pytest.approx(1.0)  # not started yet
    one.chunk_started("p0", "a")
    one.chunk_started("p0", "a")  # said twice
    one.now_s = 0.3
    assert a.remaining_s(0.3) == pytest.approx(0.7)
    one.suspended("p0", "a", 0.3)
    assert a.remaining_s(2.0) == pytest.approx(0.7)
    one.now_s = 2.0
    one.chunk_started("p0", "a")
    assert a.remaining_s(2.5) == pytest.approx(0.2)
    one.now_s = 2.5
    one.suspended("p0", "a", 0.8)  # over all stretches
    assert a.remaining_s(9.0) == pytest.approx(0.2)
    assert a.remaining_work_s(9.0) == pytest.approx(0.2)
    one.computed("p0", "a")
    assert a.remaining_s(9.0) == 0.0


def test_finished_chunks_count_as_they_were_predicted_whatever_they_took() -> None:
    one = scripted(bench(2), {300: [(100, (0,)), (200, (0, 1))]})
    one.submit("a", 300, ttft_s=9.0)  # 0.1 s, then 0.1 s on two
    a = one.machine.requests["a"]
    assert (a.predicted_prefill_s, a.predicted_work_s) == pytest.approx((0.2, 0.3))
    one.chunk_started("p0", "a")
    one.now_s = 0.4  # it takes far longer
    assert a.remaining_s(0.4) == 0.0
    one.computed("p0", "a", last=False)
    assert a.remaining_s(0.4) == pytest.approx(0.1)
    one.chunk_started("p0", "a", 1)
    one.now_s = 0.45
    one.suspended("p0", "a", 0.05, 1)
    assert a.remaining_s(7.0) == pytest.approx(0.05)
    assert a.remaining_work_s(7.0) == pytest.approx(0.3 * 0.05 / 0.2)


def test_a_second_attempt_starts_from_nothing() -> None:
    one = bench(2)
    one.submit("a", 1000, ttft_s=9.0)
    one.chunk_started("p0", "a")
    one.now_s = 0.3
    one.suspended("p0", "a", 0.3)
    one.chunk_started("p0", "a")
    one.died("p0")
    one.released("d0", "a")
    assert one.machine.requests["a"].remaining_s(9.0) == pytest.approx(1.0)


def test_words_about_a_chunk_whose_turn_has_not_come_are_ignored() -> None:
    one = scripted(bench(2), {300: [(100, (0,)), (200, (0, 1))]})
    one.submit("a", 300, ttft_s=9.0)
    for say in (one.chunk_started, one.computed):
        before = one.machine.ignored
        assert say("p0", "a", 1) == [] and one.machine.ignored == before + 1
    one.computed("p0", "a", last=False)
    before = one.machine.ignored
    one.chunk_started("p1", "a", 1)  # the leader speaks, no other
    assert one.machine.ignored == before + 1
    one.chunk_started("p0", "a", 1)
    assert one.machine.ignored == before + 1


# ---- whole runs


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


rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
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
    """Queues and what runs are at all times as the machine believes; no work is lost or redone."""
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
    if POLICIES[policy].static:  # or an order may be taken back before it is carried out
        assert preempted == one.machine.preemptions
    if preemption == "none":
        assert "preempt" not in counts
