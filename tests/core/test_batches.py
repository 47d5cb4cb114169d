"""Prompts batched into one task: their pages, their order, and members that leave."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.effects import CancelOn, Order, RunPrefill
from millrace.core.request import RequestState
from support.core_events import Bench, groups_of, instance, of, queues
from support.prefill_fleet import Fleet, scripted


def bench(*, pages: int = 1000, count: int = 1, **more) -> Bench:
    """One slot an instance unless told otherwise, so that requests wait and can be batched."""
    given = {"policy": "edf", "preemption": "operator", "batch_tokens": 1000, "tasks_ahead": 1}
    latency = groups_of(1, 2)
    fleet = [instance(f"p{i}", pages=pages, latency=latency, node="n") for i in range(count)]
    decode = [instance(f"d{i}", pages=10_000) for i in range(2)]
    return Bench(*fleet, *decode, config=SchedulerConfig(**(given | more)))


def sent(found) -> list[str]:
    return [e.request_id for e in of(RunPrefill, found)]


def batched(one: Bench, *rows: tuple[str, int, float]) -> list:
    """Submits "first", then the rows (id, tokens, objective) behind it; what its end sends."""
    one.submit("first", 100, ttft_s=1.0)
    one.chunk_started("p0", "first")
    for name, tokens, slo_s in rows:
        assert sent(one.submit(name, tokens, ttft_s=slo_s)) == []
    return one.computed("p0", "first")


def task_of(one: Bench, name: str):
    (pool,) = one.machine.cluster.pools.values()
    return pool.board.find(name, 0)


def test_what_waits_is_sent_together_and_ordered_as_one_entry() -> None:
    one = bench()
    found = batched(one, ("a", 100, 5.0), ("b", 200, 6.0), ("c", 300, 7.0))
    assert sent(found) == ["a", "b", "c"]
    assert queues(found) == {"p0": ["a+b+c"]}
    task = task_of(one, "c")
    assert task is task_of(one, "a") and task.predicted_s == pytest.approx(0.6)
    assert one.machine.requests["a"].predicted_prefill_s == pytest.approx(0.6)  # ends with the rest


def test_a_batch_stays_under_its_budget_of_tokens() -> None:
    found = batched(bench(), ("a", 100, 5.0), ("b", 899, 6.0), ("c", 1, 7.0))
    assert sent(found) == ["a", "b"]
    found = batched(bench(), ("a", 100, 5.0), ("b", 900, 6.0), ("c", 1, 7.0))
    assert sent(found) == ["a", "c"]  # b would make it 1000


def test_a_batch_ends_before_its_heads_deadline() -> None:
    found = batched(bench(), ("a", 100, 1.1), ("b", 850, 6.0))
    assert sent(found) == ["a", "b"]  # 0.95 s, and a tenth of 1.1 s to spare
    found = batched(bench(), ("a", 100, 1.05), ("b", 850, 6.0))
    assert sent(found) == ["a"]


def test_without_a_budget_everyone_is_alone() -> None:
    assert sent(batched(bench(batch_tokens=0), ("a", 100, 5.0), ("b", 100, 6.0))) == ["a"]


def test_a_batch_takes_no_pages_that_are_not_there() -> None:
    one = bench(pages=20)  # "first" keeps 7 of them until its cache is sent
    found = batched(one, ("a", 96, 5.0), ("b", 128, 6.0), ("c", 112, 7.0))
    assert sent(found) == ["a", "c"]  # 6 and 7 pages; b needs 8
    assert one.machine.cluster.instances["p0"].free_pages == 0


def test_what_a_group_computes_is_not_batched() -> None:
    one = scripted(bench(count=2), {100: [(100, (0, 1))], 300: [(300, (0,))]})
    found = batched(one, ("a", 100, 5.0), ("b", 300, 6.0))
    assert set(sent(found)) == {"a"}


def test_a_plan_of_several_chunks_is_not_batched() -> None:
    one = scripted(bench(count=2), {100: [(100, (0,))], 200: [(100, (0,)), (100, (0, 1))]})
    found = batched(one, ("a", 200, 5.0), ("b", 100, 6.0))
    assert set(sent(found)) == {"a"}


# ---- a batch runs, yields and ends as one


def test_a_batch_yields_and_goes_on_as_one() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0))
    for name in "ab":
        one.chunk_started("p0", name)
    assert queues(one.submit("top", 10, ttft_s=0.5)) == {"p0": ["top", "a+b"]}
    assert one.machine.preemptions == 1
    for name in "ab":
        one.suspended("p0", name, 0.1)
    assert task_of(one, "b").remaining_s(9.0) == pytest.approx(0.2)
    assert one.machine.requests["a"].remaining_s(9.0) == pytest.approx(0.2)
    one.computed("p0", "top")
    assert task_of(one, "a").chosen


def test_every_member_is_done_by_its_own_word() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0))
    one.submit("next", 100, ttft_s=9.0)
    states = [one.machine.requests[name].state for name in "ab"]
    assert states == [RequestState.PREFILLING] * 2
    assert sent(one.computed("p0", "a")) == []
    assert one.machine.requests["a"].state is RequestState.TRANSFERRING
    assert one.machine.requests["b"].state is RequestState.PREFILLING
    one.released("p0", "a")  # its only token is out before the others have said a word
    assert sent(one.computed("p0", "b")) == ["next"]
    assert one.machine.requests["b"].remaining_s(9.0) == 0.0


# ---- members that leave


def test_a_member_that_is_cancelled_leaves_the_others() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0), ("c", 50, 7.0))
    found = one.cancel("b")
    assert [e.request_id for e in of(CancelOn, found) if e.instance_id == "p0"] == ["b"]
    task = task_of(one, "a")
    assert [r.id for r in task.requests] == ["a", "c"] and task_of(one, "b") is None
    for name in "ac":
        one.computed("p0", name)
    assert not one.machine.cluster.instances["p0"].queue


def test_a_cancelled_head_hands_over_what_the_batch_has_done() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0), ("c", 100, 7.0))
    one.chunk_started("p0", "a")
    one.now_s = 0.1
    one.suspended("p0", "a", 0.1)
    one.chunk_started("p0", "a")
    one.cancel("a")
    task, heir = task_of(one, "b"), one.machine.requests["b"]
    assert [r.id for r in task.requests] == ["b", "c"]
    assert task.remaining_s(0.2) == pytest.approx(0.2)
    assert heir.remaining_s(0.2) == pytest.approx(0.2)
    assert heir.predicted_work_s == pytest.approx(0.4)
    top = one.submit("top", 10, ttft_s=0.1)
    assert queues(top) == {"p0": ["top", "b+c"]}


def test_a_head_that_is_retried_and_its_batch_are_told_apart() -> None:
    """The batch goes on under its heir's order: the old head keeps its own."""
    one = bench(policy="fcfs", tasks_ahead=2)
    one.submit("x", 100, ttft_s=10.0)
    batched_with = [("y", 100), ("h", 100), ("m", 100)]
    for name, tokens in batched_with:
        one.submit(name, tokens, ttft_s=10.0)
    one.computed("p0", "x")
    assert [r.id for r in task_of(one, "h").requests] == ["h", "m"]
    at = one.machine.requests["h"].decode_id
    one.failed("p0", "h")
    one.released("p0", "h")
    one.released(at, "h")
    one.computed("p0", "y")
    (pool,) = one.machine.cluster.pools.values()
    assert [[r.id for r in task.requests] for task in pool.board.ranked] == [["h"], ["m"]]
    assert len({task.rank for task in pool.board.ranked}) == 2
    one.computed("p0", "m")  # must not take out h's task
    assert task_of(one, "h") is not None and task_of(one, "m") is None


def test_a_batch_whose_last_member_leaves_makes_room() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0))
    one.submit("next", 100, ttft_s=9.0)
    assert sent(one.cancel("a")) == []
    assert sent(one.cancel("b")) == ["next"]


def test_a_dead_instance_gives_all_of_a_batch_back_for_another_attempt() -> None:
    one = bench()
    batched(one, ("a", 100, 5.0), ("b", 200, 6.0))
    one.died("p0")
    states = {r.id: (r.state, r.attempts) for r in one.machine.requests.values() if r.id != "first"}
    assert states == dict.fromkeys("ab", (RequestState.QUEUED, 1))


# ---- whole runs


def test_workers_compute_a_batch_at_once() -> None:
    fleet = Fleet(bench(), preemptive=True)
    fleet.serve(
        [(0.0, "first", 100, 1.0), (0.01, "a", 100, 5.0), (0.02, "b", 200, 6.0)],
    )
    assert fleet.commands() == ["submit first", "submit a+b"]
    assert fleet.computed_s == pytest.approx({"first": 0.1, "a": 0.4, "b": 0.4})
    ordered = of(Order, fleet.bench.all)
    assert len(ordered) == 1
