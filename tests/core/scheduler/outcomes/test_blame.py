"""Whom the breakers blame for the errors of one request."""

from __future__ import annotations

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.outcomes.breakers import Breakers
from support.core_events import Bench, instance
from support.live_requests import live_request

NAMES = ("p0", "p1", "p2", "d0", "d1", "d2")


def breakers(errors: int = 2) -> Breakers:
    fleet = Bench(*map(instance, NAMES)).machine.cluster
    return Breakers(SchedulerConfig(breaker_errors=errors), fleet, {})


def fail(found: Breakers, name: str, *parties: str, fault: str = "transfer") -> list[str]:
    return found.failed(live_request(name), fault, parties, 0.0)


def test_a_request_counts_once_against_an_instance() -> None:
    found = breakers()
    assert fail(found, "a", "p0") == fail(found, "a", "p0") == []
    assert fail(found, "b", "p0") == ["p0"]


def test_only_those_who_took_part_in_all_errors_of_a_request_stay_blamed() -> None:
    found = breakers()
    assert fail(found, "a", "p0", "d0") == fail(found, "a", "p0", "d1") == []
    assert fail(found, "b", "p1", "d0") == []  # d0 has one error: the first is p0's
    assert fail(found, "c", "p0", "d2") == ["p0"]


def test_an_error_counts_as_what_it_was_last() -> None:
    found = breakers()
    fail(found, "a", "p0", fault="transfer")
    fail(found, "a", "p0", fault="compute")
    found.proved(live_request("other"), ["p0"], frozenset({"transfer"}))
    assert fail(found, "b", "p0") == ["p0"]  # a compute error is no matter of a transfer


def test_a_request_that_fails_everywhere_is_at_fault_itself() -> None:
    found = breakers()
    poison = live_request("poison")
    for party in ("p0", "p1"):
        assert found.failed(poison, "compute", [party], 0.0) == []
    # Its errors are forgotten, and later ones do not count.
    assert poison.suspicion.fails_everywhere
    for party in ("p0", "p1"):
        assert fail(found, party, party) == []
    assert found.failed(poison, "compute", ["p1"], 0.0) == []
    assert fail(found, "last", "p1") == ["p1"]


def test_a_probe_that_fails_by_its_own_fault_says_nothing_of_the_instance() -> None:
    found = breakers(errors=1)
    assert fail(found, "a", "p1") == ["p1"]
    found.check(1e6)
    assert found.state("p1") == "half_open"
    poison = live_request("poison")
    assert found.failed(poison, "transfer", ["p0"], 1e6) == ["p0"]
    assert found.failed(poison, "transfer", ["p1"], 1e6) == []
    assert found.state("p1") == "half_open"
