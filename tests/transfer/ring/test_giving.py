"""The plan of given history: offers, answers, and the possible writers."""

from __future__ import annotations

from millrace.transfer.ring.giving import Giving
from millrace.transfer.ring.messages import KEPT


def test_a_receiver_answers_the_offers_that_it_waits_for_and_no_others() -> None:
    giving = Giving(range(2))
    giving.offered("a", 1)
    giving.offered("b", 1)
    giving.arrivals.expect("a", 1)
    assert giving.next_calls() == [("a", 1)]
    assert giving.next_calls() == []
    giving.arrivals.expect("b", 1)
    assert giving.next_calls() == [("b", 1)]


def test_a_giver_that_was_not_answered_cannot_be_writing() -> None:
    giving = Giving(range(1))
    for giver, chunk in (("a", 1), ("b", 1), ("decode", KEPT)):
        giving.arrivals.expect(giver, chunk)
    giving.offered("a", 1)
    giving.next_calls()
    assert giving.writers() == {"a", "decode"}
    giving.arrivals.arrived("a", 1, 0)
    assert giving.writers() == {"decode"}
