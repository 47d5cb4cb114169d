"""The policy `millrace`: as many in time as a search over all subsets finds, and a bounded wait."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.priority.millrace import (
    BACKLOG_S,
    LEAST_S,
    SHARE,
    WAIT_BOUND,
    given_up,
    keys,
)
from support.priority import request


@pytest.fixture(autouse=True)
def whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests count on all that the pool does, unless a test says otherwise."""
    monkeypatch.setattr("millrace.core.priority.millrace.SHARE", 1.0)


QUARTER_S = 0.25  # sums of these are exact


def one(name: str, deadline_s: float, work_s: float, *, sp: int = 1, **more) -> LiveRequest:
    """Returns `work_s` seconds on a group of `sp`."""
    found = request(name, deadline_s=deadline_s, work_s=work_s, **more)
    found.predicted_work_s = sp * work_s
    return found


def order_of(requests: list[LiveRequest], now_s: float = 0.0, instances: int = 1) -> list[str]:
    found = keys(requests, now_s, instances)
    rows = sorted(zip(found, [r.order for r in requests], requests, strict=True))
    return [r.id for _, _, r in rows]


def in_time(requests: list[LiveRequest], now_s: float, instances: int) -> bool:
    """Returns whether all end by their deadlines when computed by deadline."""
    done_s = now_s
    for r in sorted(requests, key=lambda r: r.deadline_s):
        done_s += r.remaining_work_s(now_s) / instances
        if done_s > r.deadline_s or now_s + r.remaining_s(now_s) > r.deadline_s:
            return False
    return True


rows = st.lists(
    st.tuples(st.integers(-4, 40), st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=8
)


def drawn(given_rows: list[tuple[int, int, int]]) -> list[LiveRequest]:
    """Rows: deadline, work, and work done already, in quarters of a second."""
    return [
        one(
            f"r{i}",
            deadline * QUARTER_S or QUARTER_S,
            work * QUARTER_S,
            executed_s=min(done, work) * QUARTER_S,
            order=i,
        )
        for i, (deadline, work, done) in enumerate(given_rows)
    ]


@settings(max_examples=300)
@given(rows)
def test_on_one_instance_no_larger_set_can_be_in_time(given_rows) -> None:
    requests = drawn(given_rows)
    late = given_up(requests, 0.0, 1)
    kept = [r for r in requests if r.id not in late]
    assert in_time(kept, 0.0, 1)
    larger = combinations(requests, len(kept) + 1)
    assert not any(in_time(list(some), 0.0, 1) for some in larger)


@settings(max_examples=200)
@given(rows)
def test_the_kept_go_by_deadline_and_the_given_up_behind_them_likewise(given_rows) -> None:
    requests = drawn(given_rows)  # no request has waited, so none is overdue
    late = given_up(requests, 0.0, 1)
    by_deadline = sorted(requests, key=lambda r: (r.deadline_s, r.order))
    kept = [r.id for r in by_deadline if r.id not in late]
    assert order_of(requests) == kept + [r.id for r in by_deadline if r.id in late]


def test_the_one_with_the_most_work_left_is_given_up() -> None:
    requests = [
        one("long", 3.0, 3.0, order=0),
        one("a", 3.5, 1.0, order=1),
        one("b", 4.0, 1.0, order=2),
    ]
    assert order_of(requests) == ["a", "b", "long"]
    requests[0].executed_s = 2.5  # finished work counts
    assert order_of(requests) == ["long", "a", "b"]


def test_an_end_at_the_deadline_is_in_time() -> None:
    assert given_up([one("a", 1.0, 1.0)], 0.0, 1) == {}
    assert list(given_up([one("a", 1.0, 1.01)], 0.0, 1)) == ["a"]


def test_what_is_late_by_itself_takes_nobody_along() -> None:
    requests = [one("lost", 1.0, 2.0, order=0), one("a", 1.5, 1.5, order=1)]
    assert order_of(requests) == ["a", "lost"]


def test_a_request_given_up_may_be_in_time_a_round_later() -> None:
    long, short = one("long", 3.0, 2.5, order=0), one("short", 2.0, 1.0, order=1)
    assert order_of([long, short]) == ["short", "long"]
    assert list(given_up([long], 0.25, 1)) == []


def test_work_is_counted_in_seconds_times_instances() -> None:
    pair = [one("a", 1.0, 1.0, order=0), one("b", 1.0, 1.0, order=1)]
    assert list(given_up(pair, 0.0, 1)) == ["a"]
    assert given_up(pair, 0.0, 2) == {}
    # A group of four for a second is four seconds of a pool of four.
    assert given_up([one("gang", 1.01, 1.0, sp=4)], 0.0, 4) == {}
    pair = [one("gang", 1.01, 1.0, sp=4), one("other", 1.2, 1.0)]
    assert list(given_up(pair, 0.0, 4)) == ["gang"]


def test_requests_count_on_a_share_of_the_pool_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.core.priority.millrace.SHARE", SHARE)
    needed_s = 2.0 / SHARE
    for sp, instances in ((4, 4), (1, 1)):
        soon = one("soon", needed_s - 0.02, 0.5, sp=sp)
        assert given_up([soon, one("r", needed_s + 0.01, 1.5, sp=sp)], 0.0, instances) == {}
        late = given_up([soon, one("r", needed_s - 0.01, 1.5, sp=sp)], 0.0, instances)
        assert list(late) == ["r"]


def test_a_request_that_is_alone_may_use_all_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.core.priority.millrace.SHARE", SHARE)
    assert given_up([one("r", 1.01, 1.0)], 0.0, 1) == {}
    assert given_up([one("gang", 1.01, 1.0, sp=4)], 0.0, 4) == {}


def test_half_done_work_of_a_group_counts_half() -> None:
    gang = one("gang", 1.0, 1.0, sp=4, executed_s=0.5)
    assert gang.remaining_work_s(0.0) == pytest.approx(2.0)
    assert given_up([gang], 0.0, 4) == {}


# ---- bounded wait


def overdue(name: str = "old", *, work_s: float = BACKLOG_S / 2, order: int = 9) -> LiveRequest:
    return one(name, -50.0, work_s, arrival_s=-100.0, order=order)


def test_an_overdue_one_goes_before_everything_while_little_is_given_up() -> None:
    fresh = one("fresh", 9.0, 0.5, order=1)
    assert order_of([fresh, overdue()]) == ["old", "fresh"]
    more = one("lost", 0.1, BACKLOG_S, order=2)  # beyond the backlog that the promise allows
    assert order_of([fresh, overdue(), more]) == ["fresh", "old", "lost"]
    assert order_of([fresh, overdue(), more], instances=2) == ["old", "fresh", "lost"]


def test_the_backlog_is_counted_to_its_limit() -> None:
    fresh = one("fresh", 9.0, 0.5, order=1)
    assert order_of([fresh, overdue(work_s=BACKLOG_S)]) == ["old", "fresh"]
    assert order_of([fresh, overdue(work_s=BACKLOG_S * 1.01)]) == ["fresh", "old"]


def test_among_overdue_ones_the_longest_since_arrival_goes_first() -> None:
    first, second = overdue("first", work_s=0.1), overdue("second", work_s=0.1, order=1)
    second.arrival_s = -90.0
    second.deadline_s = -95.0
    assert order_of([second, first]) == ["first", "second"]


def test_the_wait_is_counted_in_isolated_prefills_of_a_least_length() -> None:
    fresh = one("fresh", 999.0, 0.5, order=1)
    for work_s in (0.01, BACKLOG_S):
        bound_s = WAIT_BOUND * max(work_s, LEAST_S)
        for waited_s, first in ((bound_s - 0.01, "fresh"), (bound_s + 0.01, "old")):
            old = one("old", -50.0, work_s, arrival_s=-waited_s, order=2)
            assert order_of([fresh, old])[0] == first


def test_time_spent_computing_is_no_wait() -> None:
    fresh = one("fresh", 9.0, 0.5, order=1)
    bound_s = WAIT_BOUND * LEAST_S
    old = one("old", -50.0, LEAST_S, arrival_s=-bound_s - 0.1, executed_s=0.2, order=2)
    assert order_of([fresh, old])[0] == "fresh"
    old = one("old", -50.0, LEAST_S, arrival_s=-bound_s - 0.1, running_since_s=-0.2, order=2)
    assert order_of([fresh, old])[0] == "fresh"


def test_one_that_can_be_in_time_needs_no_promise() -> None:
    waiting = one("waiting", 5.0, 0.5, arrival_s=-100.0, order=0)
    assert order_of([one("soon", 1.0, 0.5, order=1), waiting]) == ["soon", "waiting"]


def test_its_keys_are_computed_anew_in_every_round() -> None:
    assert not POLICIES["millrace"].static
    assert keys([], 0.0, 4) == []
