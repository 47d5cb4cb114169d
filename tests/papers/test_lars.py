"""LARS, Medha section 4.1: rho_i = s_i / w_i_total."""

import math

import pytest
from hypothesis import given

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.priority.lars import relative_slack
from support.lars_example import finish_times
from support.priority import any_requests, keys_of, names, ranked, request


def test_the_papers_two_relative_slacks() -> None:
    """ "when r_L arrives with absolute slack of 6 seconds but relative slack 0.6"; r_S: 1.0"""
    assert relative_slack(request(deadline_s=16.0, work_s=10.0), 0.0) == 0.6
    assert relative_slack(request(arrival_s=5.0, deadline_s=6.0, work_s=0.5), 5.0) == 1.0


def test_a_short_request_preempts_once_its_relative_slack_is_below_the_long_ones() -> None:
    """The long one runs and keeps 0.6; the short one waits and reaches 0.6 at 5.2 s."""
    long = request("long", deadline_s=16.0, work_s=10.0, running_since_s=0.0)
    short = request("short", arrival_s=5.0, deadline_s=6.0, work_s=0.5, order=1)
    assert names(ranked("lars", [long, short], now_s=5.19)) == ["long", "short"]
    assert names(ranked("lars", [long, short], now_s=5.21)) == ["short", "long"]


def test_executed_work_raises_slack_but_not_the_divisor() -> None:
    r = request(deadline_s=16.0, work_s=10.0, executed_s=5.0)
    assert relative_slack(r, 0.0) == (16.0 - 5.0) / 10.0


def test_medhas_scenario_under_the_formula() -> None:
    """All three would meet their deadlines, says the paper; under its formula the short ones are
    0.2 s late, since each waits until its relative slack is as low as the long one's 0.6."""
    got = finish_times("lars")
    assert got == pytest.approx({"short 1": 6.2, "short 2": 6.21, "long": 11.0}, abs=0.011)


def test_medhas_scenario_with_slack_over_the_deadlines_length() -> None:
    got = finish_times("lars_deadline")
    assert got == pytest.approx({"short 1": 6.12, "short 2": 6.13, "long": 11.0}, abs=0.011)


def test_the_deadlines_length_is_counted_from_arrival() -> None:
    r = request(arrival_s=10.0, deadline_s=14.0, work_s=1.0)
    assert keys_of("lars_deadline", [r], 11.0) == [((14.0 - 11.0 - 1.0) / 4.0,)]


@pytest.mark.parametrize("policy", ["lars", "lars_deadline"])
def test_no_deadline_comes_last(policy: str) -> None:
    requests = [request("none", work_s=1.0), request("far", deadline_s=1e6, work_s=1.0, order=1)]
    assert names(ranked(policy, requests)) == ["far", "none"]


def test_without_work_there_is_all_or_no_slack() -> None:
    assert relative_slack(request(deadline_s=1.0), 0.0) == math.inf
    assert relative_slack(request(deadline_s=1.0), 2.0) == -math.inf
    assert relative_slack(request(deadline_s=1.0), 1.0) == 0.0
    assert relative_slack(request(), 0.0) == math.inf


def test_a_deadline_at_arrival_divides_by_nothing() -> None:
    r = request(arrival_s=1.0, deadline_s=1.0, work_s=1.0)
    assert keys_of("lars_deadline", [r], 1.0) == [(-math.inf,)]


@given(any_requests())
def test_any_order_is_by_the_quotient(requests: list[LiveRequest]) -> None:
    timed = [r for r in requests if r.predicted_prefill_s > 0.0]
    rho = [
        (r.deadline_s - 1.0 - r.remaining_s(1.0)) / r.predicted_prefill_s
        for r in ranked("lars", timed, 1.0)
    ]
    assert rho == sorted(rho)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(requests=any_requests())
def test_every_policy_ranks_anything(policy: str, requests: list[LiveRequest]) -> None:
    """One key per request, of one length, never NaN: sorting by it is an order."""
    keys = keys_of(policy, requests, 0.0, 3)
    assert len(keys) == len(requests)
    assert len({len(key) for key in keys}) <= 1
    assert not any(math.isnan(part) for key in keys for part in key)
