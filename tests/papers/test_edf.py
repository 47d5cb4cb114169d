"""EDF as FlowPrefill section 6.3 and Medha section 4.1 use it."""

import pytest
from hypothesis import given

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from support.lars_example import finish_times
from support.priority import any_requests, keys_of, names, ranked, request


def test_the_soonest_deadline_goes_first() -> None:
    requests = [request("late", deadline_s=3.0), request("none"), request("soon", deadline_s=1.0)]
    assert names(ranked("edf", requests)) == ["soon", "late", "none"]


def test_a_missed_deadline_outranks_all_to_come() -> None:
    """Medha section 4.1: past its deadline the long request is ahead of every future arrival."""
    long = request("long", deadline_s=16.0, work_s=10.0)
    new = request("new", arrival_s=17.0, deadline_s=18.0, work_s=0.5, order=1)
    assert names(ranked("edf", [new, long], now_s=17.0)) == ["long", "new"]


def test_equal_deadlines_keep_the_order_of_submission() -> None:
    requests = [request("b", deadline_s=1.0, order=1), request("a", deadline_s=1.0, order=0)]
    assert names(ranked("edf", requests)) == ["a", "b"]


def test_keys_stay_as_time_passes() -> None:
    requests = [request(deadline_s=2.0, work_s=1.0, running_since_s=0.0)]
    assert keys_of("edf", requests, 0.0, 1) == keys_of("edf", requests, 100.0, 4)
    ranking = POLICIES["edf"]().ranking()
    for one in (*requests, request("other", deadline_s=1.0)):
        ranking.add(one, 0.0)
    assert ranking.update(100.0, 4) == {}


def test_medhas_scenario() -> None:
    assert finish_times("edf") == pytest.approx({"short 1": 5.5, "short 2": 6.0, "long": 11.0})


def test_medhas_scenario_under_fcfs_misses_both_short_deadlines() -> None:
    """ "Requests wait until time 10, missing their deadlines at time 6." """
    assert finish_times("fcfs") == pytest.approx({"long": 10.0, "short 1": 10.5, "short 2": 11.0})


@given(any_requests())
def test_any_order_is_by_deadline(requests: list[LiveRequest]) -> None:
    order = ranked("edf", requests)
    assert [r.deadline_s for r in order] == sorted(r.deadline_s for r in requests)
