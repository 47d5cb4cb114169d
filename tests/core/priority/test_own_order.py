"""A tenant's own order: priorities exchange the tenant's places, and nobody else waits longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES
from millrace.core.priority.own_order import MOST, ranking_of
from millrace.core.request import Slo
from support.live_requests import live_request


def request(
    name: str,
    arrival_s: float,
    *,
    priority: int = 0,
    work_s: float = 1.0,
    tokens: int = 10,
    tenant: str = "a",
    class_name: str = "chat",
) -> LiveRequest:
    return live_request(
        name,
        prompt_tokens=tokens,
        arrival_s=arrival_s,
        deadline_s=arrival_s + 5.0,
        predicted_prefill_s=work_s,
        predicted_work_s=work_s,
        order=int(100 * arrival_s),
        tenant=tenant,
        priority=priority,
        slo=Slo(ttft_s=5.0, class_name=class_name),
    )


def order(requests: Sequence[LiveRequest], policy: str = "fcfs", now_s: float = 20.0) -> list[str]:
    ranking = ranking_of(POLICIES[policy]())
    keys = {one.id: ranking.add(one, now_s) for one in requests}
    for _ in range(3):
        keys.update(ranking.update(now_s, 1))
    return [one.id for one in sorted(requests, key=lambda one: (keys[one.id], one.order))]


def test_a_request_takes_the_place_of_a_later_one_of_its_tenant():
    three = [request("x", 0), request("y", 1), request("z", 2, priority=-1)]
    assert order(three) == ["z", "y", "x"]
    yields = [request("x", 0, priority=1), request("y", 1), request("z", 2)]
    assert order(yields) == ["y", "z", "x"]


def test_other_tenants_and_classes_keep_their_places():
    requests = [
        request("other", 0, tenant="b"),
        request("mine", 1),
        request("document", 2, class_name="document"),
        request("urgent", 3, priority=-5),
    ]
    assert order(requests) == ["other", "urgent", "document", "mine"]


@pytest.mark.parametrize("larger", [{"work_s": 1.1}, {"tokens": 11}])
def test_a_larger_request_takes_no_place(larger):
    assert order([request("x", 0), request("y", 1, priority=-1, **larger)]) == ["x", "y"]


def test_places_return_when_their_owner_or_its_priority_is_gone():
    ranking = ranking_of(POLICIES["fcfs"]())
    first, second, third = request("x", 0), request("y", 1), request("z", 2, priority=-1)
    keys = {one.id: ranking.add(one, 3.0) for one in (first, second, third)}
    assert ranking.update(3.0, 1) == {"z": (*keys["x"], 200.0), "x": (*keys["z"], 0.0)}
    ranking.remove(third)
    assert ranking.update(3.0, 1) == {"x": keys["x"]}
    assert ranking.update(3.0, 1) == {}
    keys["z"] = ranking.add(third, 3.0)
    ranking.update(3.0, 1)
    ranking.remove(first)
    assert ranking.update(3.0, 1) == {"z": (*keys["y"], 200.0), "y": (*keys["z"], 100.0)}
    newer = request("w", 4)
    keys["w"] = ranking.replace(second, newer)
    assert ranking.update(4.0, 1) == {"z": keys["z"]}


def test_only_the_first_of_many_exchange_their_places():
    many = [request(f"r{i:03}", i) for i in range(MOST)]
    inside = [*many[:-1], request("last", MOST, priority=-1)]
    assert order(inside)[0] == "last"
    assert order([*many, request("last", MOST, priority=-1)])[-1] == "last"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "a", "others"]),
            st.integers(-2, 2),
            st.sampled_from([0.5, 1.0, 3.0]),
            st.sampled_from([5, 20]),
        ),
        max_size=9,
    ),
    st.sampled_from(sorted(POLICIES)),
)
def test_nobody_else_has_more_work_before_it(drawn, policy):
    def made(*, stated: bool) -> list[LiveRequest]:
        return [
            request(
                f"r{i}",
                float(i // 2),  # some arrive at the same time
                tenant=tenant,
                priority=priority if stated and tenant == "a" else 0,
                work_s=work_s,
                tokens=tokens,
            )
            for i, (tenant, priority, work_s, tokens) in enumerate(drawn)
        ]

    plain = number(made(stated=False))
    before, after = order(plain, policy), order(number(made(stated=True)), policy)
    for size in ("predicted_work_s", "prompt_tokens"):
        sizes = {one.id: getattr(one, size) for one in plain}
        for one in plain:
            if one.tenant == "others":
                ahead = [sum(map(sizes.get, ids[: ids.index(one.id)])) for ids in (before, after)]
                assert ahead[1] <= ahead[0]


def number(requests: list[LiveRequest]) -> list[LiveRequest]:
    """Gives the requests their order of submission."""
    for place, one in enumerate(requests):
        one.accept(place)
    return requests
