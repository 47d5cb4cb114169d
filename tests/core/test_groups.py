"""Groups through the machine: pages of shares, members without room, members that die."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core import events
from millrace.core.config import SchedulerConfig
from millrace.core.effects import CancelOn, Place, Refuse, RunPrefill
from millrace.core.planning.plan import Plan, PlannedChunk
from millrace.core.request import RequestState
from support.core_events import Bench, groups_of, instance, of, queues
from support.prefill_fleet import Fleet, scripted


def bench(count: int, *, pages: int = 100, context: int = 100_000, sp=(1, 2, 4), **more) -> Bench:
    """Pages of 16 tokens; a prompt of 1000 tokens takes 1 s on one instance."""
    latency = groups_of(*sp)
    fleet = [
        instance(f"p{i}", pages=pages, latency=latency, node="n", context=context)
        for i in range(count)
    ]
    settings_ = SchedulerConfig(**{"planner": "single_chunk", "improvement_rate": 0.9, **more})
    return Bench(*fleet, instance("d0", pages=100_000, context=context), config=settings_)


def members(found) -> list[str]:
    return [e.instance_id for e in of(RunPrefill, found)]


def used(one: Bench) -> list[int]:
    instances = one.machine.cluster.instances
    return [i.used_pages for name, i in sorted(instances.items()) if name.startswith("p")]


# ---- pages


@pytest.mark.parametrize(
    "chunks, pages",
    [
        ([(320, (0,))], [20, 0, 0, 0]),
        ([(320, (0, 1))], [10, 10, 0, 0]),
        ([(100, (0,)), (220, (0, 1))], [14, 10, 0, 0]),  # p0 keeps the 3 pages that it gives
        ([(200, (0,)), (120, (0, 1))], [17, 10, 0, 0]),
        ([(160, (0,)), (80, (0, 1)), (80, (0, 1, 2, 3))], [15, 10, 6, 6]),
        ([(33, (0, 1))], [2, 1, 0, 0]),  # 17 tokens at the leader
    ],
)
def test_a_member_holds_what_it_computes_and_what_it_is_given(chunks, pages) -> None:
    tokens = sum(n for n, _ in chunks)
    one = scripted(bench(4), {tokens: chunks})
    one.submit("a", tokens)
    assert used(one) == pages


def test_pages_are_freed_member_by_member() -> None:
    one = scripted(bench(2), {320: [(320, (0, 1))]})
    one.submit("a", 320)
    one.computed("p0", "a")
    one.released("p1", "a")
    assert used(one) == [10, 0]
    one.released("p0", "a")
    assert used(one) == [0, 0]


def test_a_prompt_too_long_for_one_instance_gets_a_group() -> None:
    one = bench(4, pages=10)  # 160 tokens each
    assert members(one.submit("a", 161)) == ["p0", "p1"]
    assert members(one.submit("b", 160)) == ["p2"]


def test_the_longest_prompt_is_what_the_largest_group_holds() -> None:
    one = bench(4, pages=10)
    assert [e.code for e in of(Refuse, one.submit("a", 641))] == ["too_large"]
    assert len(members(one.submit("b", 640))) == 4


def test_the_context_is_a_limit_that_no_group_lifts() -> None:
    one = bench(4, pages=10, context=500)
    assert [e.code for e in of(Refuse, one.submit("a", 480, 21))] == ["too_large"]
    assert len(members(one.submit("b", 480, 20))) == 4


def test_members_without_pages_are_planned_around() -> None:
    one = bench(2, pages=10)
    one.submit("a", 100)  # 7 pages of p0, which is free to compute
    one.computed("p0", "a")
    assert members(one.submit("b", 100)) == ["p1"]


def test_an_idle_instance_with_pages_is_found_behind_many_without() -> None:
    one = bench(5, pages=10)  # each of the first three has room for a quarter of the prompt only
    for name, prefill in zip("abc", ["p0", "p1", "p2"], strict=True):
        assert members(one.submit(name, 100)) == [prefill]
    for name, prefill in zip("abc", ["p0", "p1", "p2"], strict=True):
        one.computed(prefill, name)
    assert members(one.submit("d", 100)) == ["p3"]


def test_nobody_passes_a_group_that_waits_for_pages() -> None:
    one = bench(2, pages=10, sp=(1, 2), policy="fcfs", preemption="none")
    one.submit("a", 100)
    one.computed("p0", "a")
    assert members(one.submit("both", 320)) == []  # 10 pages of each
    assert members(one.submit("small", 10)) == []
    assert members(one.released("p0", "a")) == ["p0", "p1"]


def test_two_requests_are_never_promised_the_same_pages() -> None:
    one = scripted(bench(2, pages=20), {320: [(320, (0, 1))]})
    for name in "abc":
        one.submit(name, 320)
    assert used(one) == [20, 20]
    assert [r.id for r in one.machine.requests.values() if r.chunks] == ["a", "b"]


# ---- chunks on growing groups


def test_every_member_gets_the_plan_and_queues_its_own_chunks() -> None:
    one = scripted(bench(2, tasks_ahead=9), {300: [(100, (0,)), (200, (0, 1))], 10: [(10, (0,))]})
    found = one.submit("a", 300)
    assert [(e.instance_id, len(e.chunks)) for e in of(RunPrefill, found)] == [("p0", 2), ("p1", 2)]
    instances = one.machine.cluster.instances
    assert [t.chunk.index for t in instances["p0"].queue] == [0, 1]
    assert [t.chunk.index for t in instances["p1"].queue] == [1]


def test_between_two_chunks_a_better_request_gets_in() -> None:
    one = scripted(
        bench(2, policy="edf", preemption="chunk"),
        {300: [(100, (0,)), (200, (0, 1))], 10: [(10, (1,))]},
    )
    one.submit("a", 300, ttft_s=9.0)
    assert queues(one.submit("b", 10, ttft_s=1.0)) == {"p1": ["b", "a.1"]}
    one.computed("p0", "a", last=False)
    chosen = [
        (task.requests[0].id, task.chunk.index)
        for task in one.machine.cluster.instances["p1"].queue
        if task.chosen
    ]
    assert chosen == [("b", 0)]


# ---- deaths


@pytest.mark.parametrize("dead, told", [("p0", ["p1", "d0"]), ("p1", ["p0", "d0"])])
def test_a_members_death_sends_the_request_back_and_lets_others_go_on(dead, told) -> None:
    one = scripted(
        bench(3, tasks_ahead=9, preemption="operator"),
        {320: [(320, (0, 1))], 100: [(100, (0,))], 110: [(110, (1,))]},
    )
    one.submit("gang", 320)
    one.submit("on0", 100)
    one.submit("on1", 110)
    found = one.died(dead)
    assert [e.instance_id for e in of(CancelOn, found) if e.request_id == "gang"] == told
    stays = {"p0": "on1", "p1": "on0"}[dead]
    queue = one.machine.cluster.instances[told[0]].queue
    assert [(t.requests[0].id, t.chosen) for t in queue] == [(stays, True)]
    gang = one.machine.requests["gang"]
    assert gang.state is RequestState.QUEUED and gang.attempts == 1 and gang.chunks == ()


def test_a_request_whose_member_died_is_prefilled_by_those_that_let_go() -> None:
    one = bench(4, pages=10, max_attempts=3)
    one.submit("a", 161)
    found = one.died("p0")
    assert not of(Place, found)  # d0 has not let go
    one.released("p1", "a")
    found = one.released("d0", "a")
    assert len(members(found)) == 2 and one.machine.requests["a"].attempts == 2


def test_a_death_after_decode_began_takes_the_tasks_along() -> None:
    """Decode's word may overtake the leader's: what the dead were to compute is never chosen."""
    one = scripted(bench(2, preemption="operator"), {320: [(320, (0, 1))], 100: [(100, (1,))]})
    one.submit("a", 320)
    one.decoding("d0", "a")
    assert not of(CancelOn, one.died("p0"))
    (pool,) = one.machine.cluster.pools.values()
    assert pool.board.ranked == [] and one.machine.cluster.instances["p1"].queue == []
    one.finished("d0", "a")
    assert not one.machine.requests


def test_a_new_member_takes_the_place_of_a_dead_one() -> None:
    one = bench(2, pages=10)
    one.died("p0")
    one.step(instance("p2", pages=10, latency=groups_of(1, 2), node="n", context=100_000))
    (pool,) = one.machine.cluster.pools.values()
    bits = [i.bit for i in pool.prefill.values()]
    assert len(set(bits)) == 2 and sum(bits) == pool.board.everyone == 3
    assert len(members(one.submit("a", 161))) == 2


def test_a_draining_member_finishes_its_group_and_gets_no_other() -> None:
    one = bench(3, pages=10, sp=(1, 2))
    one.submit("a", 161)  # p0 and p1
    one.drains("p1")
    assert members(one.submit("b", 161)) == []  # p0 has no pages for another share
    one.computed("p0", "a")
    assert one.machine.requests["a"].state is RequestState.TRANSFERRING
    assert sorted(members(one.released("p0", "a"))) == ["p0", "p2"]


def test_a_larger_group_is_tried_where_members_of_a_smaller_one_lack_pages() -> None:
    one = bench(2, pages=10, sp=(1, 2))
    for name in ("p0", "p1"):  # 7 of 10 pages are taken, the tasks themselves are done
        one.submit(name, 112)
    for leader, (name,) in [(e.instance_id, (e.request_id,)) for e in of(RunPrefill, one.all)]:
        one.computed(leader, name)
    found = one.submit("a", 60)  # 4 pages of one instance, 2 of each of two
    assert members(found) == ["p0", "p1"]


class AnyGroup:
    """A planner that picks by the numbers a test drew, of degree `least_sp` or more."""

    def __init__(self, numbers: list[int], size: int) -> None:
        self.numbers, self.size = numbers, size

    def plan(self, tokens, queue_s, least_sp=1) -> Plan:
        free = [i for i in range(self.size) if queue_s[i] < 1e8]
        degrees = [sp for sp in (1, 2, 4) if sp >= least_sp] or [4]
        sp = degrees[self.numbers.pop() % len(degrees)]
        if len(free) < sp:
            free = list(range(self.size))
        start = self.numbers.pop() % len(free)
        order = tuple((free[start:] + free[:start])[:sp])
        return Plan((PlannedChunk(tokens, order),), 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(0, 1 << 30).map(Random),
    st.sampled_from(["none", "operator"]),
    st.sampled_from(["fcfs", "edf", "lrs"]),
)
def test_random_gangs_all_end_and_pages_are_never_promised_twice(
    prompts, random, preemption, policy
) -> None:
    """No group waits for another in a circle, whichever members they have in common."""
    one = bench(5, pages=20, policy=policy, preemption=preemption, tasks_ahead=3)
    (pool,) = one.machine.cluster.pools.values()
    pool._prepare()
    pool._planner = AnyGroup([random.randrange(1000) for _ in range(5000)], 5)
    fleet = Fleet(one, preemptive=preemption != "none")
    fleet.serve(
        [
            (random.random() / 2, f"r{i}", tokens, random.random() * 2 + 0.01)
            for i, tokens in enumerate(prompts)
        ]
    )
    assert len(fleet.computed_s) == len(prompts)
    assert used(one) == [0] * 5


def test_the_machine_hears_the_leader_whoever_it_is() -> None:
    one = scripted(bench(3), {300: [(300, (2, 0))]})
    one.submit("a", 300)
    one.computed("p0", "a")
    assert one.machine.requests["a"].state is RequestState.PREFILLING
    one.computed("p2", "a")
    assert one.machine.requests["a"].state is RequestState.TRANSFERRING
    assert one.machine.ignored == 1


def test_a_member_that_lets_go_while_the_others_compute_gave_the_request_up() -> None:
    one = scripted(bench(2), {300: [(300, (0, 1))]})
    one.submit("a", 300)
    found = one.step(events.RequestReleased(instance_id="p1", generation=1, request_id="a"))
    assert sorted(e.instance_id for e in of(CancelOn, found)) == ["d0", "p0"]
