"""S-EDF, FlowPrefill section 5.2, Eq. (3): priority = sgn(slack) / deadline."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority.slack import slack_s
from support.priority import any_requests, names, ranked, request


def test_slack_is_deadline_less_now_less_predicted_ttft() -> None:
    assert slack_s(request(deadline_s=10.0, work_s=4.0), 3.0) == 3.0


def test_executed_work_counts() -> None:
    """The work of ended spans counts, and that of the current span, which began 1.5 s ago."""
    r = request(deadline_s=10.0, work_s=4.0, executed_s=1.0, running_since_s=1.5)
    assert slack_s(r, 3.0) == 10.0 - 3.0 - (4.0 - 1.0 - 1.5)


def test_work_that_outlasts_its_prediction_is_not_negative() -> None:
    assert slack_s(request(deadline_s=10.0, work_s=1.0, running_since_s=0.0), 3.0) == 7.0


def test_the_highest_priority_is_the_earliest_deadline_that_can_be_met() -> None:
    requests = [
        request("lost", deadline_s=2.0, work_s=3.0),
        request("later", deadline_s=9.0, work_s=1.0, order=1),
        request("sooner", deadline_s=5.0, work_s=4.0, order=2),
    ]
    assert names(ranked("s_edf", requests)) == ["sooner", "later", "lost"]


def test_among_lost_requests_the_latest_deadline_goes_first() -> None:
    """-1/deadline: -1/2 < -1/4 < -1/8."""
    requests = [request(f"{d:g}", deadline_s=d, work_s=9.0) for d in (2.0, 8.0, 4.0)]
    assert names(ranked("s_edf", requests)) == ["8", "4", "2"]


def test_a_slack_of_zero_counts_as_negative() -> None:
    requests = [request("zero", deadline_s=4.0, work_s=4.0), request("fine", deadline_s=5.0)]
    assert names(ranked("s_edf", requests)) == ["fine", "zero"]


def test_without_deadline_behind_what_can_be_met_and_before_what_is_lost() -> None:
    """1/inf = 0 lies between the two signs."""
    requests = [
        request("lost", deadline_s=1.0, work_s=2.0),
        request("none", work_s=2.0, order=1),
        request("fine", deadline_s=1e9, work_s=2.0, order=2),
    ]
    assert names(ranked("s_edf", requests)) == ["fine", "none", "lost"]


def test_progress_turns_a_lost_request_into_one_that_can_be_met() -> None:
    lost = request("a", deadline_s=4.0, work_s=5.0)
    other = request("b", deadline_s=8.0, work_s=1.0, order=1)
    assert names(ranked("s_edf", [lost, other])) == ["b", "a"]
    lost.executed_s = 2.0
    assert names(ranked("s_edf", [lost, other])) == ["a", "b"]


@given(any_requests())
def test_the_order_is_that_of_eq_3(requests: list[LiveRequest]) -> None:
    """In exact arithmetic, on a clock where every deadline is positive."""
    now_s, shift_s = 0.0, 100

    def priority(r: LiveRequest) -> Fraction:
        if math.isinf(r.deadline_s):
            return Fraction(0)
        sign = 1 if r.deadline_s - now_s - r.remaining_s(now_s) > 0 else -1
        return sign / (Fraction(r.deadline_s) + shift_s)

    got = [priority(r) for r in ranked("s_edf", requests, now_s)]
    assert got == sorted(map(priority, requests), reverse=True)


@given(any_requests(), st.integers(-(2**20), 2**20))
def test_the_origin_of_the_clock_does_not_matter(requests: list[LiveRequest], shift: int) -> None:
    def exact(seconds: float) -> float:
        return round(seconds * 16) / 16  # so that adding the shift rounds nothing

    for r in requests:
        if math.isfinite(r.deadline_s):
            r.deadline_s = exact(r.deadline_s)
        r.predicted_prefill_s, r.executed_s = exact(r.predicted_prefill_s), exact(r.executed_s)
        if r.running_since_s is not None:
            r.running_since_s = exact(r.running_since_s)
    before = names(ranked("s_edf", requests, 0.0))
    for r in requests:
        r.deadline_s += shift
        if r.running_since_s is not None:
            r.running_since_s += shift
    assert names(ranked("s_edf", requests, float(shift))) == before
