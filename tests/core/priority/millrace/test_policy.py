"""The policy `millrace`: as many in time as a search over all subsets finds, and a bounded wait."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace import policy as policy_module
from millrace.core.priority.millrace.entry import (
    BACKGROUND,
    DUE,
    GIVEN_UP,
    IN_TIME,
    LATE,
    LEAD,
    LEAST_S,
)
from millrace.core.priority.millrace.late_line import LEAST_SHARE, LEAST_STRETCH, STEP
from millrace.core.priority.millrace.policy import MillracePolicy, MillraceRanking
from millrace.core.request import Slo
from millrace.core.weights import Weights
from support.live_requests import live_request

QUARTER_S = 0.25  # sums of these are exact


def one(name: str, deadline_s: float, work_s: float, *, sp: int = 1, **more) -> LiveRequest:
    """Returns `work_s` seconds on a group of `sp`, with an objective."""
    values = {"prompt_tokens": 100, "slo": Slo(ttft_s=max(deadline_s, 0.1))}
    values |= {"deadline_s": deadline_s, "predicted_prefill_s": work_s}
    return live_request(name, **{**values, "predicted_work_s": sp * work_s, **more})


def test_the_key_of_a_request_to_come_is_the_key_that_it_gets() -> None:
    policy = MillracePolicy()
    ranking = policy.ranking()
    for order, tenant in enumerate(("ann", "bob")):
        ranking.add(one(tenant, 5.0, QUARTER_S, tenant=tenant, order=order), 0.0)
        ranking.update(0.0, 1)
    served = one("served", 5.0, 16 * QUARTER_S, tenant="ann", order=2)
    ranking.add(served, 0.0)
    policy.started(served)  # its tenant is far ahead
    for order, tenant, deadline_s in ((3, "ann", 5.0), (4, "bob", 5.0), (5, "bob", -1.0)):
        new = one(f"r{order}", deadline_s, QUARTER_S, tenant=tenant, order=order)
        asked = ranking.key(new, 0.0)
        assert ranking.add(new, 0.0) == asked


def unstated(name: str, work_s: float, arrival_s: float = 0.0, **more) -> LiveRequest:
    return one(name, 1e9, work_s, slo=Slo(), arrival_s=arrival_s, **more)


class Queue:
    """A ranking as its users hold it: with the last key of each request."""

    def __init__(self, requests: list[LiveRequest], policy: MillracePolicy | None = None) -> None:
        self.policy = policy or MillracePolicy()
        self.ranking: MillraceRanking = self.policy.ranking()
        self.keys = {r.id: self.ranking.add(r, 0.0) for r in requests}
        self.requests = {r.id: r for r in requests}

    def update(self, now_s: float = 0.0, instances: int = 1) -> Queue:
        self.keys.update(self.ranking.update(now_s, instances))
        return self

    def remove(self, name: str) -> None:
        del self.keys[name]
        self.ranking.remove(self.requests.pop(name))

    @property
    def order(self) -> list[str]:
        return sorted(self.keys, key=lambda name: (self.keys[name], self.requests[name].order))

    def part(self, *parts: float) -> set[str]:
        return {name for name, key in self.keys.items() if key[0] in parts}


def kept(requests: list[LiveRequest], now_s: float = 0.0, instances: int = 1) -> set[str]:
    return Queue(requests).update(now_s, instances).part(IN_TIME)


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


# ---- the set in time


@settings(max_examples=100)
@given(rows)
def test_on_one_instance_no_larger_set_can_be_in_time(given_rows) -> None:
    requests = drawn(given_rows)
    chosen = kept(requests)
    assert in_time([r for r in requests if r.id in chosen], 0.0, 1)
    larger = combinations(requests, len(chosen) + 1)
    assert not any(in_time(list(some), 0.0, 1) for some in larger)


@settings(max_examples=100)
@given(rows)
def test_the_kept_go_by_deadline_then_those_given_up_likewise_then_the_late(given_rows) -> None:
    requests = drawn(given_rows)
    queue = Queue(requests).update()
    by_deadline = [r.id for r in sorted(requests, key=lambda r: (r.deadline_s, r.order))]
    parts = [queue.part(IN_TIME), queue.part(GIVEN_UP)]
    expected = [name for part in parts for name in by_deadline if name in part]
    assert queue.order[len(queue.part(DUE)) :][: len(expected)] == expected
    possible = {r.id for r in requests if r.remaining_s(0.0) <= r.deadline_s}
    assert parts[0] | parts[1] <= possible


def test_the_one_with_the_most_work_left_is_given_up() -> None:
    requests = [
        one("long", 3.0, 3.0, order=0),
        one("a", 3.5, 1.0, order=1),
        one("b", 4.0, 1.0, order=2),
    ]
    assert Queue(requests).update().order == ["a", "b", "long"]
    requests[0].executed_s = 2.5  # finished work counts
    assert Queue(requests).update().order == ["long", "a", "b"]


def test_an_end_at_the_deadline_is_in_time() -> None:
    assert kept([one("a", 1.0, 1.0)]) == {"a"}
    assert kept([one("a", 1.0, 1.01)]) == set()


def test_what_is_late_by_itself_takes_nobody_along() -> None:
    requests = [one("lost", 1.0, 2.0, order=0), one("a", 1.5, 1.5, order=1)]
    assert Queue(requests).update().order == ["a", "lost"]


def test_a_request_given_up_may_be_in_time_a_round_later() -> None:
    queue = Queue([one("long", 3.0, 2.5, order=0), one("short", 2.0, 1.0, order=1)]).update()
    assert queue.order == ["short", "long"] and queue.part(GIVEN_UP) == {"long"}
    queue.remove("short")
    assert queue.update(0.25).part(IN_TIME) == {"long"}


def test_work_is_counted_in_seconds_times_instances() -> None:
    pair = [one("a", 1.0, 1.0, order=0), one("b", 1.0, 1.0, order=1)]
    assert len(kept(pair)) == 1
    assert kept(pair, instances=2) == {"a", "b"}
    # A group of four for a second is four seconds of a pool of four.
    assert kept([one("gang", 1.01, 1.0, sp=4)], instances=4) == {"gang"}
    pair = [one("gang", 1.01, 1.0, sp=4), one("other", 1.2, 1.0)]
    assert kept(pair, instances=4) == {"other"}


def test_half_done_work_of_a_group_counts_half() -> None:
    gang = one("gang", 1.0, 1.0, sp=4, executed_s=0.5)
    assert gang.remaining_work_s(0.0) == pytest.approx(2.0)
    assert kept([gang], instances=4) == {"gang"}


@settings(max_examples=100)
@given(rows=rows, most=st.integers(1, 4))
def test_a_sweep_in_pieces_finds_the_same_set(rows, most) -> None:
    whole = kept(drawn(rows))
    queue = Queue(drawn(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "MOST", most)
        for _ in range(2 * len(rows) + 2):
            queue.update()
    assert queue.part(IN_TIME) == whole


def test_an_update_looks_at_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    remaining = LiveRequest.remaining_s

    def looking(request: LiveRequest, now_s: float) -> float:
        nonlocal looks
        looks += 1
        return remaining(request, now_s)

    requests = [one(f"r{i}", 1.0 + i % 7, 0.01 + i % 5, order=i) for i in range(2000)]
    queue = Queue(requests)
    monkeypatch.setattr(LiveRequest, "remaining_s", looking)
    worst = changed = 0
    for number in range(100):
        before = looks
        found = queue.ranking.update(number * 0.01, 1)
        worst, changed = max(worst, looks - before), max(changed, len(found))
    assert worst <= 3 * policy_module.MOST
    assert changed <= 4 * policy_module.MOST


# ---- the lead of requests on groups


def with_headroom() -> MillracePolicy:
    """Returns a policy under which a thousand requests have been in time."""
    policy = MillracePolicy()
    for number in range(1000):
        policy.first_token(one(f"before{number}", 1.0, 0.1), 0.5)
    return policy


def test_a_request_on_a_group_goes_before_what_is_due_within_its_lead() -> None:
    lead_s = LEAD * 4.0 * (1 - 1 / 4)
    requests = [
        one("document", 12.0, 4.0, sp=4, order=0),
        one("before", 12.0 - lead_s - 0.3, 0.1, order=1),
        one("after", 12.0 - lead_s + 0.3, 0.1, order=2),
    ]
    assert Queue(requests, with_headroom()).update(0.0, 4).order == ["before", "document", "after"]
    requests[0].executed_s = 3.0  # its lead is by its whole prefill: started work isn't put off
    assert Queue(requests, with_headroom()).update(0.0, 4).order == ["before", "document", "after"]


def test_no_request_leads_where_there_is_nothing_to_spare() -> None:
    requests = [one("document", 12.0, 4.0, sp=4, order=0), one("chat", 11.9, 0.1, order=1)]
    assert Queue(requests).update(0.0, 4).order == ["chat", "document"]


def test_a_request_on_one_instance_has_no_lead() -> None:
    requests = [one("document", 12.0, 4.0, order=0), one("chat", 11.9, 0.1, order=1)]
    assert Queue(requests, with_headroom()).update(0.0, 4).order == ["chat", "document"]


def test_leads_end_when_there_is_nothing_left_to_spare() -> None:
    requests = [one("document", 12.0, 4.0, sp=4, order=0), one("chat", 11.9, 0.1, order=1)]
    queue = Queue(requests, with_headroom()).update(0.0, 4)
    assert queue.order == ["document", "chat"]
    for number in range(200):
        queue.policy.first_token(one(f"late{number}", 1.0, 0.1), 1.5)
    assert queue.update(0.1, 4).order == ["chat", "document"]


def test_a_lead_is_bounded_by_the_usual_objectives() -> None:
    """A book would otherwise go before every chat of its last minutes."""
    queue = Queue([one(f"c{i}", 1.5, 0.01, order=i) for i in range(400)], with_headroom())
    for name in list(queue.requests):
        queue.remove(name)
    for request in [
        one("book", 900.0, 200.0, sp=8, order=500),
        one("later", 900.0 - 4.0, 0.1, order=501),
        one("latest", 900.0 - 2.0, 0.1, order=502),
    ]:
        queue.requests[request.id] = request
        queue.keys[request.id] = queue.ranking.add(request, 0.0)
    assert queue.update(0.0, 8).order == ["later", "book", "latest"]


# ---- the late


def test_without_objectives_equal_requests_go_first_come_first_served() -> None:
    requests = [unstated(f"r{i}", 1.0, arrival_s=i * 0.1, order=i) for i in range(30)]
    queue = Queue(requests)
    for number in range(40):
        queue.update(3.0 + number * 0.5)
        assert queue.order == sorted(queue.keys, key=lambda name: int(name[1:]))
        if queue.keys:
            queue.remove(queue.order[0])


def test_without_objectives_a_short_request_goes_before_a_long_one_that_came_earlier() -> None:
    queue = Queue([unstated("long", 30.0, order=0), unstated("short", 0.5, 5.0, order=1)])
    assert queue.update(5.0).order == ["short", "long"]
    # But not for ever: the long one is due once it has waited in proportion.
    queue.remove("short")
    for now_s in range(6, 200):
        queue.update(float(now_s))
    late = unstated("later", 0.5, 200.0, order=2)
    queue.keys["later"] = queue.ranking.add(late, 200.0)
    queue.requests["later"] = late
    queue.update(200.0)
    assert queue.order.index("long") < queue.order.index("later")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=12))
def test_all_that_is_late_is_done_when_due(given_rows) -> None:
    """By one stretch, except those that are due already: what they were promised stays."""
    requests = [
        unstated(f"r{i}", work / 4, -came / 4, order=i) for i, (came, work) in enumerate(given_rows)
    ]
    queue = Queue(requests)
    for _ in range(30):
        queue.update(0.0)
    done_s = 0.0
    factors = set()
    for name in queue.order:
        request = queue.requests[name]
        done_s += request.remaining_s(0.0)
        due_s = queue.keys[name][1]
        assert done_s <= due_s + 1e-9
        size_s = max(request.predicted_prefill_s, LEAST_S)
        factor = round((due_s - request.arrival_s) / size_s, 6)
        assert factor >= LEAST_STRETCH
        if queue.keys[name][0] == LATE:
            factors.add(factor)
    assert len(factors) <= 1


def test_a_late_request_is_served_however_many_could_be_in_time() -> None:
    """Urgent work comes as fast as the instance can do it, and the wait is that of the stretch."""
    document = one("document", 1.0, 20.0, order=0)  # late from the start
    queue = Queue([document])
    now_s, number, waited_s = 0.0, 0, None
    while now_s < 10_000.0 and waited_s is None:
        number += 1
        chat = one(f"c{number}", now_s + 2.0, 0.5, arrival_s=now_s, order=number)
        queue.requests[chat.id] = chat
        queue.keys[chat.id] = queue.ranking.add(chat, now_s)
        queue.update(now_s)
        first = queue.order[0]
        if first == "document":
            waited_s = now_s
        else:
            queue.remove(first)
        now_s += 0.5
    done_s = 20.0 / LEAST_SHARE  # when that share of the instance would have done it
    assert waited_s is not None and done_s - 20.0 <= waited_s <= STEP * done_s


def test_parts_are_in_order() -> None:
    assert DUE < IN_TIME < GIVEN_UP < LATE


def batch(name: str, work_s: float, arrival_s: float = 0.0) -> LiveRequest:
    """Returns a request of a batch, as the proxy sends it: due in a day."""
    slo = Slo(ttft_s=86400.0, class_name="batch")
    return one(name, 86400.0 + arrival_s, work_s, slo=slo, arrival_s=arrival_s)


def test_batches_go_after_all_others_by_arrival_however_long_they_wait() -> None:
    late = one("late", 0.5, 5.0)
    requests = [batch("b", 0.1, 1.0), batch("a", 9.0), unstated("plain", 50.0), late]
    queue = Queue([*requests, one("urgent", 9.0, 1.0)])
    for now_s in (0.0, 10.0, 1e4, 1e6):  # others are due by and by; batches never are
        queue.update(now_s)
        assert queue.order[-2:] == ["a", "b"]
        assert queue.part(BACKGROUND) == {"a", "b"}
    queue.remove("a")
    assert queue.update(2e6).order[-1] == "b"


def test_batches_change_no_key_and_no_attainment_of_others() -> None:
    requests = [one(f"r{i}", 2.0 + i, 1.5, order=i) for i in range(6)]
    alone, beside = Queue(requests), Queue([*requests, *(batch(f"b{i}", 9.0) for i in range(50))])
    for now_s in (0.0, 1.0, 3.0):
        alone.update(now_s)
        beside.update(now_s)
        assert {name: beside.keys[name] for name in alone.keys} == alone.keys
    before = beside.policy.attainments.of_class("default")
    for i in range(50):
        beside.policy.first_token(beside.requests[f"b{i}"], 100.0)
    assert beside.policy.attainments.of_class("default") == before
    assert beside.policy.value(beside.requests["b0"]) == 0.0


def test_a_configured_class_batch_is_a_class_like_others() -> None:
    policy = MillracePolicy()
    policy.weigh(Weights(classes={"batch": 1.0}))
    assert Queue([batch("a", 1.0)], policy).update().part(IN_TIME) == {"a"}
