"""The agreed stop of the ranks of a group: FlowPrefill section 5.1 under tensor parallelism."""

from __future__ import annotations

import multiprocessing
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.parallel.stop_counter import StopCounter
from support.deadlines import HANG_S

CONTEXT = multiprocessing.get_context("spawn")


def test_nobody_is_held_up_while_nobody_stops() -> None:
    counter = StopCounter(CONTEXT, 3)
    assert all(counter.enter(0, operator) for operator in range(100))
    assert counter.enter(2, 0) and counter.begun(0) == 99 and counter.begun(1) == -1


def test_the_stop_is_the_first_operator_that_no_rank_has_begun() -> None:
    counter = StopCounter(CONTEXT, 2)
    for operator in range(5):
        assert counter.enter(1, operator)
    assert counter.enter(0, 0)
    assert counter.request_stop() == 5
    assert not counter.enter(1, 5)
    assert all(counter.enter(0, operator) for operator in range(1, 5))
    assert not counter.enter(0, 5)


def test_a_second_request_does_not_move_an_agreed_stop() -> None:
    counter = StopCounter(CONTEXT, 2)
    assert counter.enter(0, 0) and counter.request_stop() == 1
    assert counter.request_stop() == 1


def test_a_pass_goes_on_from_where_it_stopped() -> None:
    counter = StopCounter(CONTEXT, 2)
    counter.begin(7)
    assert counter.request_stop() == 7  # before any rank began an operator
    counter.begin(7)
    assert counter.enter(0, 7) and counter.enter(1, 7)
    assert counter.request_stop() == 8


@given(st.data())
@settings(max_examples=60)
def test_in_any_order_of_steps_all_stop_at_one_operator(data: st.DataObject) -> None:
    """Sequential, over all interleavings of ranks and of the request."""
    ranks = data.draw(st.integers(1, 5))
    counter = StopCounter(CONTEXT, ranks)
    at, stopped = [0] * ranks, [False] * ranks
    stop_at = None
    while not all(stopped):
        rank = data.draw(st.sampled_from([r for r in range(ranks) if not stopped[r]]))
        if stop_at is None and data.draw(st.integers(0, 5)) == 0:
            stop_at = counter.request_stop()
            assert stop_at == max(at)
        elif counter.enter(rank, at[rank]):
            at[rank] += 1
            assert stop_at is None or at[rank] <= stop_at
        else:
            stopped[rank] = True
    assert at == [stop_at] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_threads_stop_together_and_none_waits_in_a_collective(ranks: int) -> None:
    """Every third operator is a collective: a barrier that a lone rank would break."""
    seed = random.randrange(1 << 30)
    counter = StopCounter(CONTEXT, ranks)
    at = 0
    for round_ in range(100):
        counter.begin(at)
        barrier = threading.Barrier(ranks, timeout=HANG_S)
        stops = [-1] * ranks
        jitter = [random.Random(seed + ranks * round_ + rank) for rank in range(ranks)]

        def run(rank: int, start: int, barrier=barrier, stops=stops, jitter=jitter) -> None:
            operator = start
            while counter.enter(rank, operator):
                if operator % 3 == 2:
                    barrier.wait()
                elif jitter[rank].random() < 0.3:
                    threading.Event().wait(jitter[rank].random() / 2000)
                operator += 1
            stops[rank] = operator

        threads = [threading.Thread(target=run, args=(rank, at)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        threading.Event().wait(jitter[0].random() / 200)
        agreed = counter.request_stop()
        for thread in threads:
            thread.join(HANG_S)
        assert stops == [agreed] * ranks, f"seed {seed}"
        at = agreed
