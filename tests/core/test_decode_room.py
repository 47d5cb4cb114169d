"""When a decode instance has room: pages that are booked or told of, and a pace that holds."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.decode_step import DecodeStepTime
from millrace.core.effects import Place
from support.core_events import Bench, instance, of

GROW = SchedulerConfig(decode_reserve="grow", decode_headroom_tokens=32, policy="fcfs")
STEP = DecodeStepTime(base_s=0.01, per_sequence_s=0.001, per_context_token_s=1e-5)


def places(found) -> list[tuple[str, str]]:
    return [(e.request_id, e.decode_id) for e in of(Place, found)]


def fleet(*names: str, config: SchedulerConfig = GROW, pages: int = 20, step=None) -> Bench:
    homes = [instance(name, pages=pages, decode_step=step) for name in names]
    return Bench(instance("p0", pages=10_000), *homes, config=config)


# ---- pages


@pytest.mark.parametrize(
    "reserve, new, pages", [("whole", 200, 19), ("grow", 200, 9), ("grow", 10, 7)]
)
def test_what_grows_books_its_prompt_and_some_headroom(reserve, new, pages):
    config = SchedulerConfig(decode_reserve=reserve, decode_headroom_tokens=32)
    bench = fleet("d0", config=config)
    bench.submit("a", 100, new)
    assert bench.machine.cluster.instances["d0"].holdings["a"].pages == pages
    assert bench.machine.cluster.instances["d0"].open_pages == 20 - pages


def test_whole_lives_are_booked_by_default():
    assert SchedulerConfig().decode_reserve == "whole"
    bench = fleet("d0", config=SchedulerConfig())
    bench.submit("a", 100, 200)
    assert places(bench.heartbeat("d0", free_pages=20)) == []
    assert not places(bench.submit("b", 100, 28))  # what is told makes no difference


@pytest.mark.parametrize("home, choices", [("m0", 1), ("d0", 2)])
def test_mixed_instances_and_several_choices_book_whole_lives(home, choices):
    bench = fleet(home, pages=100)
    bench.submit("a", 96, 96, choices=choices)
    instances = bench.machine.cluster.instances
    assert instances[home].holdings["a"].pages == 6 + 6 * choices


def test_more_answers_run_at_once_than_could_all_grow_to_their_end():
    bench = fleet("d0")
    assert all(places(bench.submit(name, 100, 200)) for name in "ab")
    assert not places(bench.submit("c", 100, 200))


def test_what_could_never_end_alone_is_spread_or_refused():
    bench = fleet("d0")
    assert not places(bench.submit("a", 100, 400))
    assert not bench.machine.requests  # 500 tokens at 320 slots


def test_pages_that_answers_grew_into_are_not_given_away():
    bench = fleet("d0", "d1")
    bench.heartbeat("d0", free_pages=4)
    assert places(bench.submit("a", 100, 200)) == [("a", "d1")]
    bench.heartbeat("d1", free_pages=8)
    assert not places(bench.submit("b", 100, 200))
    # A heartbeat that tells of more pages is enough for who waits.
    assert places(bench.heartbeat("d0", free_pages=9)) == [("b", "d0")]
    assert bench.machine.cluster.instances["d0"].open_pages == 0


def test_what_is_freed_counts_before_the_next_heartbeat():
    bench = fleet("d0")
    bench.submit("a", 100, 200)
    bench.heartbeat("d0", free_pages=3)
    assert not places(bench.submit("b", 100, 200))
    bench.serve("a")
    assert places(bench.all)[1:] == [("b", "d0")]


def test_a_spread_request_books_all_of_its_life():
    bench = fleet("d0", "d1")
    bench.submit("a", 200, 300)
    held = {i: one.open_pages for i, one in bench.machine.cluster.pools["h"].decode.items()}
    assert held == {"d0": 0, "d1": 8}


# ---- pace


def test_a_request_waits_where_it_would_make_others_late():
    """10 ms a step, 1 ms a sequence, 1 ms for 100 tokens of context."""
    bench = fleet("d0", config=SchedulerConfig(policy="fcfs"), pages=1000, step=STEP)
    assert places(bench.submit("a", 400, 100, tbt_s=0.020))  # 16 ms
    assert not places(bench.submit("b", 350, 50))  # 21 ms
    assert bench.machine.requests["b"].decode_id is None
    bench.submit("c", 100, 50)  # 18.5 ms, but b keeps the only instance
    bench.serve("a")
    assert [name for name, _ in places(bench.all)] == ["a", "b", "c"]


def test_its_own_objective_counts_too():
    bench = fleet("d0", config=SchedulerConfig(policy="fcfs"), pages=1000, step=STEP)
    assert places(bench.submit("a", 600, 400))
    assert not places(bench.submit("b", 100, 100, tbt_s=0.020))
    assert places(bench.submit("c", 100, 100, tbt_s=0.030)) == []  # b keeps it until it is free
    bench.cancel("b")
    assert ("c", "d0") in places(bench.all)


def test_an_empty_batch_takes_what_no_batch_could_serve_in_time():
    bench = fleet("d0", config=SchedulerConfig(policy="fcfs"), pages=1000, step=STEP)
    assert places(bench.submit("a", 1500, 100, tbt_s=0.011))
    assert not places(bench.submit("b", 10, 10))


def test_another_instance_takes_it_that_is_fast_enough():
    bench = fleet("d0", "d1", config=SchedulerConfig(), pages=1000, step=STEP)
    bench.submit("a", 400, 100, tbt_s=0.020)
    assert places(bench.submit("b", 350, 50)) == [("b", "d1")]


def test_without_a_known_step_or_an_objective_nothing_waits():
    for step, tbt_s in ((None, 0.001), (STEP, None)):
        bench = fleet("d0", config=SchedulerConfig(), pages=1000, step=step)
        assert all(places(bench.submit(name, 400, 100, tbt_s=tbt_s)) for name in "abcdef")


def test_the_tightest_objective_goes_with_its_request():
    bench = fleet("d0", config=SchedulerConfig(policy="fcfs"), pages=1000, step=STEP)
    for name, tbt_s in (("a", 0.05), ("b", 0.03), ("c", 0.08)):
        bench.submit(name, 100, 100, tbt_s=tbt_s)
    home = bench.machine.cluster.instances["d0"]
    assert home.tightest_tbt_s == 0.03
    bench.serve("b")
    assert home.tightest_tbt_s == 0.05
    bench.serve("a")
    bench.serve("c")
    assert home.tightest_tbt_s == float("inf")


def test_a_home_of_a_shard_counts_what_it_reads_of_it():
    config = SchedulerConfig(max_kv_tokens_per_worker=320)
    bench = fleet("d0", "k0", config=config, pages=100, step=STEP)
    bench.submit("a", 500, 100)
    home = bench.machine.cluster.instances["d0"]
    assert (home.sequences, home.context_tokens) == (1, 320)
