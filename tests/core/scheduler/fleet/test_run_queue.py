"""The run queue alone: which tasks run, the orders to instances, and the queue times."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.cost.correction import band_of
from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.run_queue import YIELDING_WEIGHT, RunQueue
from millrace.core.scheduler.fleet.task import Task, masks
from support.core_events import instance, queues
from support.live_requests import live_request
from support.prefill_fleet import Work, Workers

BEHIND = ((math.inf,), 10**9, 0)  # a rank that goes after all others


class NoRanking:
    """Tests give tasks their ranks themselves."""

    def remove(self, request: LiveRequest) -> None:
        """Knows no requests."""


def pool(count: int, *, preemptive: bool) -> tuple[RunQueue, list[PrefillInstance]]:
    board = RunQueue(NoRanking(), preemptive=preemptive)
    found = [PrefillInstance(instance(f"p{i}"), 1 << i) for i in range(count)]
    board.everyone = (1 << count) - 1
    return board, found


def tasks(
    instances: list[PrefillInstance],
    name: str,
    key: float,
    chunks: list[tuple[float, tuple[int, ...]]],
    order: int = 0,
) -> list[Task]:
    """Returns a request's chunks: (seconds, its members)."""
    work_s = sum(seconds for seconds, _ in chunks)
    request = live_request(name, prompt_tokens=10, order=order, predicted_prefill_s=work_s)
    found: list[Task] = []
    for index, (seconds, group) in enumerate(chunks):
        members = tuple(instances[i] for i in group)
        ids = tuple(member.id for member in members)
        found.append(
            Task(
                requests=[request],
                chunk=Chunk(index=index, start_token=index, num_tokens=1, instance_ids=ids),
                members=members,
                mask=masks(members),
                modelled_s=seconds,
                predicted_s=seconds,
                band=band_of(1),
                rank=((key,), order, index),
                previous=found[-1] if found else None,
            )
        )
    return found


def chosen(board: RunQueue) -> list[str]:
    return [_name(task) for task in board.ranked if task.chosen]


def _name(task: Task) -> str:
    return task.requests[0].id + (f".{task.chunk.index}" if task.chunk.index else "")


def put(board: RunQueue, *many: list[Task]) -> dict[str, list[str]]:
    """Adds each request's tasks, then chooses; returns the ordered queues."""
    for found in many:
        board.add(found)
    return queues(board.orders())


def end(board: RunQueue, task: Task) -> dict[str, list[str]]:
    assert board.finish(task, task.requests[0])
    return queues(board.orders())


# ---- who runs


def test_what_comes_behind_needs_no_order_and_what_comes_before_does() -> None:
    board, ps = pool(1, preemptive=True)
    assert put(board, tasks(ps, "b", 2, [(1, (0,))])) == {}
    assert put(board, tasks(ps, "c", 3, [(1, (0,))], 1)) == {}
    assert put(board, tasks(ps, "a", 1, [(1, (0,))], 2)) == {"p0": ["a", "b", "c"]}


def test_only_what_ranks_lower_and_shares_a_member_yields() -> None:
    board, ps = pool(3, preemptive=True)
    put(
        board,
        tasks(ps, "low", 3, [(1, (0, 1))], 0),
        tasks(ps, "apart", 4, [(1, (2,))], 1),
    )
    assert put(board, tasks(ps, "worse", 5, [(1, (1,))], 2)) == {}
    told = put(board, tasks(ps, "better", 1, [(1, (1,))], 3))
    assert chosen(board) == ["better", "apart"]
    assert told["p1"] == ["better", "low", "worse"] and "p2" not in told


def test_a_yielding_task_is_counted_only_if_it_computes() -> None:
    board, ps = pool(1, preemptive=True)
    low, mid, top = (tasks(ps, n, 3 - i, [(1, (0,))], i) for i, n in enumerate(["l", "m", "t"]))
    put(board, low)
    put(board, mid)
    assert board.preemptions == 0  # it had not said that it started
    mid[0].started_s = 0.0
    put(board, top)
    assert board.preemptions == 1


def test_a_suspended_task_goes_on_when_it_is_the_best_again() -> None:
    board, ps = pool(2, preemptive=True)
    low = tasks(ps, "low", 2, [(1, (0, 1))])
    top = tasks(ps, "top", 1, [(1, (1,))], 1)
    put(board, low)
    assert put(board, top) == {"p1": ["top", "low"]}
    assert chosen(board) == ["top"]
    end(board, top[0])
    assert chosen(board) == ["low"]
    assert [_name(t) for t in ps[1].queue] == ["low"]


def test_a_group_starts_only_when_all_members_are_unclaimed() -> None:
    for preemptive in (False, True):
        board, ps = pool(3, preemptive=preemptive)
        one, two = tasks(ps, "one", 1, [(1, (0,))]), tasks(ps, "two", 2, [(1, (1,))], 1)
        put(board, one, two, tasks(ps, "gang", 3, [(1, (0, 1, 2))], 2))
        assert chosen(board) == ["one", "two"]
        end(board, one[0])
        assert chosen(board) == ["two"]
        end(board, two[0])
        assert chosen(board) == ["gang"]


def test_with_preemption_a_blocked_groups_idle_member_is_lent_out() -> None:
    board, ps = pool(2, preemptive=True)
    top = tasks(ps, "top", 1, [(1, (0,))])
    put(board, top, tasks(ps, "gang", 2, [(1, (0, 1))], 1))
    assert put(board, tasks(ps, "low", 3, [(1, (1,))], 2)) == {"p1": ["low", "gang"]}
    assert chosen(board) == ["top", "low"]
    board.find("low", 0).started_s = 0.0
    assert end(board, top[0]) == {"p1": ["gang", "low"]}
    assert chosen(board) == ["gang"] and board.preemptions == 1


def test_without_preemption_a_blocked_group_keeps_its_turn_on_every_member() -> None:
    board, ps = pool(2, preemptive=False)
    top = tasks(ps, "top", 1, [(1, (0,))])
    gang = tasks(ps, "gang", 2, [(1, (0, 1))], 1)
    put(board, top, gang, tasks(ps, "low", 3, [(1, (1,))], 2))
    assert chosen(board) == ["top"]
    end(board, top[0])
    assert chosen(board) == ["gang"]
    end(board, gang[0])
    assert chosen(board) == ["low"]


def test_without_preemption_what_runs_stays_and_the_best_is_next() -> None:
    board, ps = pool(1, preemptive=False)
    low = tasks(ps, "low", 9, [(1, (0,))])
    put(board, low)
    put(board, tasks(ps, "mid", 5, [(1, (0,))], 1))
    assert put(board, tasks(ps, "top", 1, [(1, (0,))], 2)) == {"p0": ["low", "top", "mid"]}
    assert chosen(board) == ["low"] and board.preemptions == 0
    end(board, low[0])
    assert chosen(board) == ["top"]


def test_a_chunk_is_not_chosen_before_the_one_before_it_is_done() -> None:
    for preemptive, beside in ((True, ["r", "low"]), (False, ["r"])):
        board, ps = pool(2, preemptive=preemptive)
        parts = tasks(ps, "r", 1, [(1, (0,)), (1, (0, 1))])
        low = tasks(ps, "low", 2, [(1, (1,))], 1)
        put(board, parts, low)
        assert chosen(board) == beside  # the second chunk lends its member out, or keeps it
        end(board, parts[0])
        assert chosen(board) == ["r.1"]


def test_a_chunk_waits_for_the_one_before_it_even_on_other_instances() -> None:
    for preemptive in (True, False):
        board, ps = pool(2, preemptive=preemptive)
        parts = tasks(ps, "r", 1, [(1, (0,)), (1, (1,))])
        put(board, parts)
        assert chosen(board) == ["r"]
        end(board, parts[0])
        assert chosen(board) == ["r.1"]


def test_a_new_order_of_requests_is_told_where_it_matters() -> None:
    board, ps = pool(2, preemptive=True)
    put(board, *(tasks(ps, n, i, [(1, (0,))], i) for i, n in enumerate("ab")))
    put(board, tasks(ps, "c", 5, [(1, (1,))], 3))
    board.rerank({"a": (4.0,), "b": (1.0,), "c": (0.0,)})
    assert queues(board.orders()) == {"p0": ["b", "a"]}
    board.rerank({"a": (4.0,), "b": (1.0,), "c": (9.0,)})
    assert queues(board.orders()) == {}


# ---- how long queues are


def test_queue_s_counts_only_what_goes_before() -> None:
    for preemptive, seconds in ((True, 1.0 + 7 * YIELDING_WEIGHT), (False, 8.0)):
        board, ps = pool(1, preemptive=preemptive)
        put(board, tasks(ps, "low", 9, [(7, (0,))]))
        put(board, tasks(ps, "top", 1, [(1, (0,))], 1))
        assert board.queue_s(ps, ((5.0,), 2, 0), 0.0)[0] == pytest.approx(seconds)


def test_without_preemption_what_runs_comes_before_a_better_group_that_waits() -> None:
    board, ps = pool(2, preemptive=False)
    put(board, tasks(ps, "runs", 9, [(5, (0,))]))
    put(board, tasks(ps, "gang", 1, [(1, (0, 1))], 1))
    assert list(board.queue_s(ps, BEHIND, 0.0)) == pytest.approx([6.0, 6.0])


@st.composite
def boards(draw: st.DrawFn, *, rounds: bool) -> tuple[RunQueue, list[PrefillInstance]]:
    """Draws requests of one or two chunks, some of which arrive only once others run."""
    count = draw(st.integers(1, 4))
    board, ps = pool(count, preemptive=draw(st.booleans()))
    for order in range(draw(st.integers(0, 8))):
        members = draw(st.permutations(range(count)))
        first = draw(st.integers(1, count))
        groups = sorted({first, draw(st.integers(first, count))})
        seconds = [draw(st.integers(1, 40)) / 4 for _ in groups]
        chunks = [(s, tuple(members[:g])) for s, g in zip(seconds, groups, strict=True)]
        board.add(tasks(ps, f"r{order}", draw(st.integers(0, 5)), chunks, order))
        if rounds and draw(st.booleans()):
            board.orders()
    board.orders()
    return board, ps


def replay_s(board: RunQueue, ps: list[PrefillInstance], rank) -> list[float]:
    """When each instance is free of the work before `rank`, by events: in turn, without stops.

    An instance computes its first task. A running task comes first where it can't be stopped, else
    all is in the order of ranks, so a group waits for members and they for it.
    """
    stays = not board.preemptive
    before = [t for t in board.ranked if t.rank < rank or (stays and t.chosen)]
    before.sort(key=lambda t: (not (stays and t.chosen), t.rank))
    line = {p: [t for t in before if p in t.members] for p in ps}
    free_s, now_s, ends = dict.fromkeys(ps, 0.0), 0.0, {}
    while before:
        for task in before:
            if task not in ends and all(line[m][0] is task for m in task.members):
                ends[task] = now_s + task.remaining_s(0.0)
        now_s = min(ends.values())
        for task in [t for t, end_s in ends.items() if end_s == now_s]:
            del ends[task]
            before.remove(task)
            for member in task.members:
                line[member].remove(task)
                free_s[member] = now_s
    return [free_s[p] for p in ps]


@settings(max_examples=100)
@given(boards(rounds=True), st.integers(0, 5), st.integers(0, 8))
def test_queue_s_is_that_of_a_replay(given_board, key, order) -> None:
    board, ps = given_board
    rank = ((float(key),), order, -1)
    expected = replay_s(board, ps, rank)
    yields = [0.0] * len(ps)
    for task in board.ranked:
        if not (task.rank < rank or (task.chosen and not board.preemptive)):
            for at, one in enumerate(ps):
                yields[at] += YIELDING_WEIGHT * task.predicted_s * (one in task.members)
    found = board.queue_s(ps, rank, 0.0)
    assert list(found) == pytest.approx([a + b for a, b in zip(expected, yields, strict=True)])


def test_queue_s_of_some_instances_counts_groups_that_reach_beyond_them() -> None:
    board, ps = pool(3, preemptive=True)
    put(board, tasks(ps, "a", 1, [(3, (2,))]), tasks(ps, "b", 2, [(1, (1, 2))], 1))
    assert list(board.queue_s(ps[:2], BEHIND, 0.0)) == pytest.approx([0.0, 4.0])


def test_queue_s_leaves_out_what_was_executed() -> None:
    board, ps = pool(1, preemptive=True)
    (task,) = tasks(ps, "a", 1, [(4, (0,))])
    put(board, [task])
    task.executed_s, task.started_s = 1.0, 10.0
    assert board.queue_s(ps, BEHIND, 12.0)[0] == pytest.approx(1.0)
    assert board.queue_s(ps, BEHIND, 99.0)[0] == 0.0


# ---- many gangs, carried out


@settings(max_examples=100)
@given(boards(rounds=False), st.randoms(use_true_random=False))
def test_no_gangs_wait_for_each_other_in_a_circle(given_board, random) -> None:
    """Workers that know only their queues finish every run queue, as it expects."""
    board, ps = given_board
    named = {(t.requests[0].id, t.chunk.index): t for t in board.ranked}

    def work_of(entry) -> Work:
        task = named[entry[0]]
        previous = (entry[0][0], entry[0][1] - 1) if task.previous else None
        return Work(tuple(m.id for m in task.members), task.predicted_s, previous)

    workers = Workers(work_of, board.preemptive)
    for one in ps:
        workers.queues[one.id] = [((t.requests[0].id, t.chunk.index),) for t in one.queue]
    while board.ranked:
        stopped, started = workers.settle(0.0)
        for entry in stopped:
            named[entry[0]].started_s = None
        for entry in started:
            named[entry[0]].started_s = 0.0
        assert workers.running, "everybody waits"
        assert {e[0] for e in workers.running} == {k for k, t in named.items() if t.chosen}
        best = min(board.ranked, key=lambda t: t.rank)
        assert best.chosen or not board.preemptive  # nothing delays the best one
        done = random.choice(sorted(workers.running))
        workers.running = {done: -1e9, **{e: 0.0 for e in workers.running if e != done}}
        assert workers.finish(0.0) == [done]
        task = named.pop(done[0])
        assert board.finish(task, task.requests[0])
        if random.random() < 0.3:  # a policy with other keys
            keys = {t.requests[0].id: (random.randint(0, 5),) for t in board.ranked}
            board.rerank(keys)
        for order in board.orders():
            workers.order(order)
        for one in ps:
            assert [((t.requests[0].id, t.chunk.index),) for t in one.queue] == workers.queues[
                one.id
            ]


@settings(max_examples=100)
@given(boards(rounds=True))
def test_no_two_that_run_share_a_member_and_whoever_waits_has_a_reason(given_board) -> None:
    board, _ = given_board
    runs = [t for t in board.ranked if t.chosen]
    assert all(a.mask & b.mask == 0 for a, b in combinations(runs, 2))
    for task in board.ranked:
        if task.chosen or not task.ready:
            continue
        better = [t for t in board.ranked if t.rank < task.rank]
        keepers = [t for t in better if t.chosen] if board.preemptive else [*better, *runs]
        assert any(t.mask & task.mask for t in keepers)
