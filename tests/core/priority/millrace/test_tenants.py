"""What tenants of a class have been given: leads, and what follows from them."""

from __future__ import annotations

import math

import pytest

from millrace.core.priority.millrace.tenants import AHEAD_FROM, AHEAD_UNTIL, Tenants
from support.live_requests import live_request

#: Seconds of work that is one scale of a lead on one instance.
SCALE_S = 0.25


def request(tenant: str, name: str, work_s: float = SCALE_S):
    return live_request(name, tenant=tenant, predicted_prefill_s=work_s)


def beside(weights: dict[str, float] | None = None):
    """Two tenants that are there, with a request each, on one instance."""
    tenants = Tenants()
    tenants.weigh(weights or {})
    standings = [tenants.join(request(name, f"{name}-open")) for name in ("ann", "bob")]
    tenants.resize(1.0)
    return tenants, *standings


def test_a_tenant_alone_is_never_ahead() -> None:
    tenants = Tenants()
    standing = tenants.join(request("ann", "1", 100.0))
    tenants.started(request("ann", "1", 100.0))
    assert standing.is_alone and standing.factor == 1.0 and not standing.ahead


@pytest.mark.parametrize(
    ("weights", "ann", "bob"),
    [({}, 4.0, 4.0), ({"ann": 3.0}, 2 * 4 / 3, 8.0), ({"ann": 9.0}, 2 * 10 / 9, 20.0)],
)
def test_patience_is_twice_the_inverse_of_the_share(weights, ann, bob) -> None:
    _, first, second = beside(weights)
    assert (first.patience, second.patience) == (pytest.approx(ann), pytest.approx(bob))


def test_a_share_of_nearly_all_leaves_the_patience_of_the_others() -> None:
    tenants = Tenants()
    only = tenants.join(request("ann", "1"))
    assert only.patience == 2.0  # its share is all


def test_a_lead_is_ahead_from_two_scales_until_one() -> None:
    tenants, ann, bob = beside()
    one, other = request("ann", "1", 4.2 * SCALE_S), request("bob", "2", 2.1 * SCALE_S)
    for served in (one, other):
        tenants.join(served)
    tenants.started(one)  # 2.1 scales above the mean
    assert ann.factor == pytest.approx(math.exp(2.1))
    assert AHEAD_FROM < 2.1 and ann.ahead and not bob.ahead
    tenants.started(other)  # 1.05 above it
    assert ann.factor == pytest.approx(math.exp(1.05))
    assert AHEAD_UNTIL < 1.05 < AHEAD_FROM and ann.ahead
    more = request("bob", "3", 0.2 * SCALE_S)
    tenants.join(more)
    tenants.started(more)
    assert not ann.ahead  # 0.95


def test_work_that_was_charged_and_not_done_is_free_later() -> None:
    tenants, ann, _ = beside()
    one = request("ann", "1", 4.0 * SCALE_S)
    tenants.join(one)
    tenants.started(one)
    tenants.ended(one, now_s=0.0)  # nothing was computed
    counter = ann.counter
    again = request("ann", "2", 4.0 * SCALE_S)
    tenants.join(again)
    tenants.started(again)
    assert ann.counter == counter
