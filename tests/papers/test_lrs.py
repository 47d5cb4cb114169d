"""Least remaining slack, Medha sections 1 and 4.1: s_i = a_i + d_i - t - w_i(t)."""

import pytest
from hypothesis import given

from millrace.core.live_request import LiveRequest
from support.lars_example import finish_times
from support.priority import any_requests, names, ranked, request


def test_the_least_slack_goes_first() -> None:
    requests = [
        request("3 s", deadline_s=4.0, work_s=1.0),
        request("none", work_s=1.0, order=1),
        request("1 s", deadline_s=11.0, work_s=10.0, order=2),
        request("-1 s", deadline_s=20.0, work_s=21.0, order=3),
    ]
    assert names(ranked("lrs", requests)) == ["-1 s", "1 s", "3 s", "none"]


def test_equal_slack_of_unequal_work_ties() -> None:
    """Section 4.1's example of what raw slack does not see: 2 s to spare with 5 s or 100 s."""
    requests = [
        request("5 s", deadline_s=7.0, work_s=5.0),
        request("100 s", deadline_s=102.0, work_s=100.0, order=1),
    ]
    assert names(ranked("lrs", requests)) == ["5 s", "100 s"]
    assert names(ranked("lars", requests)) == ["100 s", "5 s"]


def test_medhas_scenario() -> None:
    """The short ones take turns from 5 s on: a waiting request loses slack, a running one does
    not."""
    got = finish_times("lrs")
    assert got == pytest.approx({"short 1": 5.99, "short 2": 6.0, "long": 11.0}, abs=1e-9)


@given(any_requests())
def test_any_order_is_by_slack(requests: list[LiveRequest]) -> None:
    now_s = 1.0
    slack = [r.deadline_s - now_s - r.remaining_s(now_s) for r in ranked("lrs", requests, now_s)]
    assert slack == sorted(slack)
