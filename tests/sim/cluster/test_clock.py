"""Simulated time: order, ties, and times that are past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.sim.cluster.clock import Clock


@given(st.lists(st.floats(0, 10)))
def test_callbacks_run_in_order_of_time_and_then_of_setting(times):
    clock, seen = Clock(), []
    for index, time_s in enumerate(times):
        clock.at(time_s, seen.append, (time_s, index))
    while clock.next_s is not None:
        clock.run_next()
    assert seen == sorted(seen)
    assert clock.ran == len(times)


def test_time_never_runs_backwards():
    clock, seen = Clock(), []
    clock.at(2.0, lambda _: clock.at(1.0, lambda _: seen.append(clock.now_s)))
    clock.run_next()
    clock.run_next()
    assert seen == [2.0]
