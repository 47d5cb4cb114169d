"""Requests for tests of order, batching and packing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES, PriorityKey
from support.live_requests import live_request


def request(
    name: str = "r",
    *,
    arrival_s: float = 0.0,
    deadline_s: float = math.inf,
    work_s: float = 0.0,
    executed_s: float = 0.0,
    running_since_s: float | None = None,
    tokens: int = 1,
    order: int = 0,
) -> LiveRequest:
    return live_request(
        name,
        prompt_tokens=tokens,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        predicted_prefill_s=work_s,
        executed_s=executed_s,
        running_since_s=running_since_s,
        order=order,
    )


#: Policies whose keys don't change with time.
STATIC = frozenset({"fcfs", "edf"})


def keys_of(
    policy: str, requests: Sequence[LiveRequest], now_s: float, instances: int = 1
) -> list[PriorityKey]:
    """Returns one key per request, in the order given."""
    ranking = POLICIES[policy]().ranking()
    keys = {request.id: ranking.add(request, now_s) for request in requests}
    keys.update(ranking.update(now_s, instances))
    return [keys[request.id] for request in requests]


def ranked(policy: str, requests: Sequence[LiveRequest], now_s: float = 0.0) -> list[LiveRequest]:
    """Sorts the highest priority first, as every user of a policy sorts."""
    keys = keys_of(policy, requests, now_s)
    return [r for _, _, r in sorted(zip(keys, (r.order for r in requests), requests, strict=True))]


def names(requests: Sequence[LiveRequest]) -> list[str]:
    return [r.id for r in requests]


def any_requests(*, no_deadline: bool = True) -> st.SearchStrategy[list[LiveRequest]]:
    """Draws up to eight requests around time 0: done, running, late, without work or deadline."""
    seconds = st.floats(0.0, 20.0)
    deadline_s = st.floats(-20.0, 40.0).filter(bool)
    one = st.builds(
        request,
        arrival_s=st.floats(-20.0, 0.0),
        deadline_s=st.one_of(deadline_s, st.just(math.inf)) if no_deadline else deadline_s,
        work_s=st.one_of(seconds, st.just(0.0)),
        executed_s=seconds,
        running_since_s=st.none() | st.floats(-5.0, 0.0),
    )

    def number(requests: list[LiveRequest]) -> list[LiveRequest]:
        for order, r in enumerate(requests):
            r.order, r.id = order, f"r{order}"
        return requests

    return st.lists(one, max_size=8).map(number)
