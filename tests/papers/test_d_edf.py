"""D-EDF, FlowPrefill section 6.3: sgn(deadline - current time) / deadline."""

from hypothesis import given

from millrace.core.live_request import LiveRequest
from support.priority import any_requests, names, ranked, request


def test_requests_that_missed_their_deadline_have_the_lowest_priority() -> None:
    requests = [
        request("missed early", deadline_s=2.0),
        request("missed late", deadline_s=4.0, order=1),
        request("soon", deadline_s=6.0, order=2),
        request("none", order=3),
        request("later", deadline_s=8.0, order=4),
    ]
    order = ["soon", "later", "none", "missed late", "missed early"]
    assert names(ranked("d_edf", requests, now_s=5.0)) == order


def test_a_deadline_of_now_is_missed() -> None:
    requests = [request("now", deadline_s=5.0), request("next", deadline_s=50.0, order=1)]
    assert names(ranked("d_edf", requests, now_s=5.0)) == ["next", "now"]


def test_it_has_no_foresight() -> None:
    """What can't be met any more keeps its place until the deadline itself has passed."""
    doomed = request("doomed", deadline_s=6.0, work_s=5.0)
    fine = request("fine", deadline_s=7.0, work_s=1.0, order=1)
    assert names(ranked("d_edf", [fine, doomed], now_s=5.0)) == ["doomed", "fine"]
    assert names(ranked("s_edf", [fine, doomed], now_s=5.0)) == ["fine", "doomed"]


@given(any_requests())
def test_the_order_is_that_of_the_quotient(requests: list[LiveRequest]) -> None:
    now_s = 30.0
    for r in requests:  # a clock on which all deadlines are positive, as the quotient needs
        r.deadline_s += 30.0

    def priority(r: LiveRequest) -> float:
        return (1.0 if r.deadline_s > now_s else -1.0) / r.deadline_s

    by_hand = sorted(requests, key=lambda r: -priority(r))
    got = ranked("d_edf", requests, now_s)
    assert [priority(r) for r in got] == [priority(r) for r in by_hand]
