"""The order's bounds: what an update costs, how old it may be, and how long a request waits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace import policy as policy_module
from millrace.core.priority.millrace.attainment import Attainments
from millrace.core.priority.millrace.policy import MOST, MOVES, MillracePolicy
from millrace.core.request import Slo
from support.live_requests import live_request


def stated(name: str, arrival_s: float, work_s: float, objective_s: float, **more) -> LiveRequest:
    return live_request(
        name,
        arrival_s=arrival_s,
        deadline_s=arrival_s + objective_s,
        predicted_prefill_s=work_s,
        predicted_work_s=work_s,
        slo=Slo(ttft_s=objective_s),
        **{"prompt_tokens": 100, **more},
    )


class Looks:
    """Counts how often each request's remaining work is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        remaining_s = LiveRequest.remaining_s

        def looking(request: LiveRequest, now_s: float) -> float:
            self.names.append(request.id)
            return remaining_s(request, now_s)

        patch.setattr(LiveRequest, "remaining_s", looking)


def mixed(count: int) -> list[LiveRequest]:
    """Requests that could be in time, that could not, and without an objective."""
    found = []
    for order in range(count):
        work_s, objective_s = 0.01 + order % 5, (2.0, 1e4, 3.0 + order % 7)[order % 3]
        one = stated(f"r{order}", 0.0, work_s, objective_s, order=order)
        if order % 4 == 0:
            one = live_request(
                one.id, slo=Slo(), predicted_prefill_s=work_s, predicted_work_s=work_s, order=order
            )
        found.append(one)
    return found


@pytest.mark.parametrize("count", [1000, 8000])
def test_an_update_costs_the_same_however_many_wait(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranking = MillracePolicy().ranking()
    for one in mixed(count):
        ranking.add(one, 0.0)
    looks = Looks(monkeypatch)
    for number in range(600):
        before = len(looks.names)
        changed = ranking.update(number * 0.05, 2)
        assert len(looks.names) - before <= 3 * MOST + MOVES
        assert len(changed) <= 3 * MOVES


def test_what_is_due_costs_no_more_than_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are due at once, and a sweep begins with every update."""
    ranking = MillracePolicy().ranking()
    for order in range(3000):
        one = live_request(f"r{order}", predicted_prefill_s=0.1, predicted_work_s=0.1, order=order)
        ranking.add(one, 0.0)
    ranking.add(stated("timed", 0.0, 0.1, 1e6, order=9999), 0.0)
    for number in range(300):
        ranking.update(1e6 + number, 1)
    looks = Looks(monkeypatch)
    ranking.update(1e6 + 300, 1)
    assert len(looks.names) <= 3 * MOST


def test_values_are_found_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = 0
    refresh = Attainments.refresh

    def counting(known: Attainments) -> None:
        nonlocal refreshed
        refreshed += 1
        refresh(known)

    policy = MillracePolicy()
    ranking = policy.ranking()
    for order in range(50):
        ranking.add(stated(f"r{order}", 0.0, 0.1, 1.0, order=order), 0.0)
    monkeypatch.setattr(Attainments, "refresh", counting)
    ranking.update(5.0, 1)  # all deadlines have passed
    assert refreshed == 1


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 60), most=st.integers(1, 8), moves=st.integers(1, 8))
def test_every_request_is_looked_at_again_within_its_turn(count, most, moves) -> None:
    requests = mixed(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "MOST", most)
        patch.setattr(policy_module, "MOVES", moves)
        ranking = MillracePolicy().ranking()
        for one in requests:
            ranking.add(one, 0.0)
        looks = Looks(patch)
        # A pass, the moves that it leads to, and the next pass; of either line.
        turns = 2 * math.ceil(count / most) + math.ceil(count / moves) + 2
        for number in range(3):
            looks.names.clear()
            for turn in range(turns):
                ranking.update(0.001 * (number * turns + turn), 1)
            # Those whose deadline has passed are no longer asked, unless they are in the late line.
            assert {one.id for one in requests} <= set(looks.names)


@pytest.mark.parametrize("moves", [1, 3, 100])
def test_equal_requests_keep_their_order_while_they_are_moved(moves, monkeypatch) -> None:
    """The stretch grows with the queue and falls again, a few requests at a time."""
    monkeypatch.setattr(policy_module, "MOVES", moves)
    ranking = MillracePolicy().ranking()
    keys, requests = {}, {}
    for order in range(40):
        one = live_request(
            f"r{order}",
            arrival_s=0.01 * order,
            predicted_prefill_s=1.0,
            predicted_work_s=1.0,
            order=order,
        )
        requests[one.id] = one
        keys[one.id] = ranking.add(one, 0.5)
    seen = set()
    for number in range(200):
        keys.update(ranking.update(0.5 + 0.001 * number, 1))
        late = [requests[name] for name, key in keys.items() if ranking.part(key) == "late"]
        late.sort(key=lambda one: (keys[one.id], one.order))
        assert [one.order for one in late] == sorted(one.order for one in late)
        seen.update(keys[one.id][1] for one in late[:1])
        if number > 80 and number % 4 == 0 and len(requests) > 2:
            last = max(requests.values(), key=lambda one: one.order)
            ranking.remove(requests.pop(last.id))
            del keys[last.id]
    assert len(seen) > 2


def served_s(load: float, until_s: float, step_s: float = 0.25) -> float:
    """Returns when a suspended document is done, as short urgent requests keep coming.

    2 s of work, of which half a second is done; `load` as a share of what the instance can do.
    """
    policy = MillracePolicy()
    ranking = policy.ranking()
    document = stated("document", 0.0, 2.0, 3.0, executed_s=0.5, prompt_tokens=10_000)
    requests = {"document": document}
    keys = {"document": ranking.add(document, 0.0)}
    now_s, next_s, order = 0.0, 0.0, 0
    while now_s < until_s:
        while next_s <= now_s:
            order += 1
            chat = stated(f"c{order}", next_s, 0.5, 2.0, order=order)
            requests[chat.id], keys[chat.id] = chat, ranking.add(chat, now_s)
            next_s += 0.5 / load
        keys.update(ranking.update(now_s, 1))
        first = min(requests.values(), key=lambda one: (keys[one.id], one.order))
        first.executed_s += step_s
        now_s += step_s
        if first.executed_s >= first.predicted_prefill_s:
            policy.first_token(first, now_s)
            ranking.remove(requests.pop(first.id))
            del keys[first.id]
            if first is document:
                return now_s
    return math.inf


def test_suspension_ends_however_long_urgent_requests_are_too_many() -> None:
    """Its wait depends on the overload when it was promised, not on how long that goes on."""
    found = {load: served_s(load, 400.0) for load in (0.8, 1.25, 1.5)}
    assert found[0.8] < 20.0
    assert found[1.25] < math.inf
    assert found[1.5] < math.inf
