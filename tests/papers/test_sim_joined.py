"""Millrace's order against the papers' on one small draw: who is in time, and who waits how long.

The full comparison is `millrace sim paper millrace-policies`; docs/papers.md has its figures.
"""

from __future__ import annotations

import pytest

from millrace.sim.papers import joined
from millrace.sim.scenario import Traffic


def case(mix: str, requests: int, scale: float, **more) -> joined.Case:
    traffic = Traffic(mix=mix, rate_rps=1.0, requests=requests, slo_scale=scale)
    return joined.Case(traffic=traffic, start=1.0, **more)


CHATS = case("qwen", 1500, 1.0, grouped=False)
MIXED = case("mixed", 1200, joined.SLO_SCALE, every_class=True)


def at(one: joined.Case, policy: str, load: float) -> joined.Edge:
    return joined.at(one, joined.policy(policy, one), load)


def attained(one: joined.Case, policy: str, load: float) -> float:
    report = at(one, policy, load).report
    assert report is not None
    return joined.attained(one, report)


def test_beyond_capacity_more_requests_are_in_time_than_under_any_other_order():
    found = {
        policy: attained(CHATS, policy, 85.0)
        for policy in ("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "millrace")
    }
    best = max(value for policy, value in found.items() if policy != "millrace")
    assert found["millrace"] >= best > found["fcfs"]


def test_nobody_waits_as_long_as_under_slack_aware_edf():
    ours, theirs = (at(MIXED, policy, 1.6) for policy in ("millrace", "s_edf"))
    assert joined.attained(MIXED, ours.report) >= 0.9
    assert ours.longest_wait < theirs.longest_wait / 2
    assert ours.longest_wait < 30


@pytest.mark.parametrize("system", joined.SYSTEMS)
def test_every_system_serves_every_request(system: str):
    one = case("mixed", 60, joined.SLO_SCALE, every_class=True)
    edge = joined.at(one, joined.SYSTEMS[system](one), 0.2)
    assert edge.report is not None and edge.report.total.succeeded == 60
    assert edge.to_json()["load"] == 0.2


def test_an_edge_is_carried_and_a_little_more_is_not():
    one = case("tetris-short", 150, joined.SLO_SCALE)
    spec = joined.policy("millrace", one)
    edge = joined.edge(one, spec)
    assert edge.load > 0 and edge.report is not None
    assert joined.attained(one, edge.report) >= joined.GOAL
    # The search's upper end is at most one tolerance above.
    above = joined.at(one, spec, edge.load * 1.3)
    assert joined.attained(one, above.report) < joined.GOAL
