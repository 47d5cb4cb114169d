"""The queue in a policy's order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from support.live_requests import live_request


def request(order: int, arrival_s: float, work_s: float = 0.1) -> LiveRequest:
    return live_request(f"r{order}", arrival_s=arrival_s, order=order, predicted_prefill_s=work_s)


@given(
    arrivals=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    leavers=st.sets(st.integers(0, 29)),
    work_s=st.floats(1e-6, 1e6),
)
def test_first_come_first_served_whatever_order_they_are_added_in(arrivals, leavers, work_s):
    line = WaitingQueue(POLICIES["fcfs"]().ranking())
    requests = [request(order, arrival_s, work_s) for order, arrival_s in enumerate(arrivals)]
    for one in reversed(requests):
        line.add(one, 9.0)
    staying = [one for one in requests if one.order not in leavers]
    for one in requests:
        if one.order in leavers:
            line.remove(one)
    assert list(line) == sorted(staying, key=lambda one: (one.arrival_s, one.order))
    assert len(line) == len(staying)
    assert all((one.id in line) is (one in staying) for one in requests)
    for one in list(line):
        assert line[0] is one
        line.remove(one)
    assert line.work_s == 0.0
