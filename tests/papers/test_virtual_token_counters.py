"""Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

A pool of one instance, which computes the first request of the order to its end, with requests that
all are late: then the order is the paper's setting. Its Theorem 4.4 bounds the difference of what
two backlogged tenants get in any interval by twice U, where U is the largest request. Here a tenant
yields from a lead of `AHEAD_FROM` scales over the mean on, so U is that lead and one request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace.policy import MOVES, MillracePolicy
from millrace.core.priority.millrace.tenants import AHEAD_FROM, SCALE_S
from millrace.core.request import Slo
from millrace.core.weights import Weights
from support.live_requests import live_request

Draw = Callable[[int], float]  # the work of a tenant's nth request, seconds


class OneInstance:
    """A queue under the policy, and what each tenant got."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.policy = MillracePolicy()
        self.policy.weigh(Weights(tenants=weights))
        self.ranking = self.policy.ranking()
        self.now_s = 0.0
        self.served = dict.fromkeys(weights, 0.0)
        self.longest_s: dict[str, float] = dict.fromkeys(weights, 0.0)
        self._order = 0
        self._keys: dict[str, tuple[float, ...]] = {}
        self._waiting: dict[str, LiveRequest] = {}

    def send(self, tenant: str, work_s: float) -> None:
        self._order += 1
        request = live_request(
            f"{tenant}{self._order}",
            tenant=tenant,
            prompt_tokens=100,
            arrival_s=self.now_s,
            slo=Slo(),
            predicted_prefill_s=work_s,
            predicted_work_s=work_s,
            order=self._order,
        )
        self._keys[request.id] = self.ranking.add(request, self.now_s)
        self._waiting[request.id] = request

    def waiting(self, tenant: str) -> int:
        return sum(request.tenant == tenant for request in self._waiting.values())

    def run_first(self) -> float:
        """Runs the first request; returns its work over weight if it was due, else 0."""
        self._keys.update(self.ranking.update(self.now_s, 1))
        name = min(self._waiting, key=lambda one: (self._keys[one], self._waiting[one].order))
        request = self._waiting.pop(name)
        is_due = self.ranking.part(self._keys.pop(name)) == "due"
        self.policy.started(request)
        self.now_s += request.predicted_prefill_s
        request.finish_chunk(0, request.predicted_prefill_s)
        self.ranking.remove(request)
        self.policy.first_token(request, self.now_s)
        self.served[request.tenant] += request.predicted_work_s
        waited_s = self.now_s - request.arrival_s
        self.longest_s[request.tenant] = max(self.longest_s[request.tenant], waited_s)
        return request.predicted_work_s / self.weights[request.tenant] if is_due else 0.0


def most_apart(works: dict[str, Sequence[float]], weights: dict[str, float]) -> float:
    """Returns the bound on the difference of two tenants' work over weight, since the start."""
    largest = max(max(one) for one in works.values())
    scale = max(SCALE_S, largest)
    by_lead = max(2 * AHEAD_FROM * scale / weight for weight in weights.values())
    return by_lead + max(largest / weight for weight in weights.values())


works = st.lists(st.floats(0.05, 2.0), min_size=1, max_size=5)


@settings(max_examples=25)
@example([1.0], [1.0], 2.0, 9)  # a's requests fall due while it is ahead
@given(works, works, st.sampled_from([1.0, 2.0, 5.0]), st.integers(2, 20))
def test_two_backlogged_tenants_get_work_by_weight_within_the_bound(
    one: list[float], other: list[float], weight: float, queued: int
) -> None:
    """Theorem 4.4: in any interval the difference is at most twice the bound from the start on.

    Requests whose promised wait is over run first, of a tenant that is ahead, too: they come on top
    until that is made up for.
    """
    drawn, weights = {"a": one, "b": other}, {"a": 1.0, "b": weight}
    pool, sent = OneInstance(weights), {"a": 0, "b": 0}
    bound, due = most_apart(drawn, weights), 0.0
    for _ in range(120):
        for tenant, depth in (("a", queued), ("b", 2)):  # tenant a floods
            while pool.waiting(tenant) < depth:
                pool.send(tenant, drawn[tenant][sent[tenant] % len(drawn[tenant])])
                sent[tenant] += 1
        due += pool.run_first()
        apart = abs(pool.served["a"] / weights["a"] - pool.served["b"] / weights["b"])
        assert apart <= bound + due + 1e-9
        if apart <= bound:
            due = 0.0


def test_an_idle_tenant_saves_nothing_up() -> None:
    """Algorithm 2, the lift: who comes back starts at the least counter of those there."""
    pool = OneInstance({"a": 1.0, "b": 1.0})
    pool.send("b", 1.0)
    pool.run_first()
    for _ in range(50):  # b is away
        pool.send("a", 1.0)
        pool.run_first()
    before = dict(pool.served)
    for _ in range(40):
        for tenant in ("a", "b"):
            while pool.waiting(tenant) < 3:
                pool.send(tenant, 1.0)
        pool.run_first()
    got = {tenant: pool.served[tenant] - before[tenant] for tenant in before}
    assert abs(got["a"] - got["b"]) <= 2 * AHEAD_FROM + 1


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_prompts_cut_in_pieces_get_no_more_work(pieces: int) -> None:
    pool = OneInstance({"cuts": 1.0, "whole": 1.0})
    while pool.now_s < 120.0:
        while pool.waiting("cuts") < 2 * pieces:
            pool.send("cuts", 2.0 / pieces)
        while pool.waiting("whole") < 2:
            pool.send("whole", 2.0)
        pool.run_first()
    assert pool.served["cuts"] <= pool.served["whole"] + 2 * AHEAD_FROM * 2.0 + 2.0


def test_a_flood_waits_a_bounded_multiple_of_its_fair_wait_and_the_other_hardly_at_all() -> None:
    """The flood sends twice what the pool can do for 60 s, the other a tenth."""
    pool = OneInstance({"flood": 1.0, "light": 1.0})
    due_s = {"flood": 0.0, "light": 0.0}
    gap_s = {"flood": 0.25, "light": 5.0}
    most = 0
    while pool.now_s < 60.0 or pool.waiting("flood") or pool.waiting("light"):
        for tenant, gap in gap_s.items():
            while due_s[tenant] <= min(pool.now_s, 60.0):
                pool.send(tenant, 0.5)
                due_s[tenant] += gap
        most = max(most, pool.waiting("flood"))
        pool.run_first()
    # Until the lead is seen (2 s of work) and the flood has been moved, the request that runs then,
    # and its own work.
    moved_s = 0.5 * math.ceil(most / MOVES)
    assert pool.longest_s["light"] <= 2 * AHEAD_FROM * 0.5 + moved_s + 0.5 + 0.5 + 0.5
    assert pool.longest_s["flood"] <= 70.0  # it is all done 126 s after the start, 66 s late
