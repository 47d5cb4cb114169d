"""Millrace's order against the papers' on one small draw: requests in time, and the longest waits.

The full comparison is `millrace sim paper millrace-policies`; docs/papers/index.md has its figures.
"""

from __future__ import annotations

from functools import cache

import pytest

from millrace.experiments.joined import common as joined
from millrace.sim.scenario import Traffic


def case(mix: str, requests: int, scale: float, **more) -> joined.Case:
    traffic = Traffic(mix=mix, rate_rps=1.0, requests=requests, slo_scale=scale)
    return joined.Case(traffic=traffic, start=1.0, **more)


CHATS = case("qwen", 1000, 1.0, grouped=False)
DOCUMENTS = case("tetris-medium", 800, joined.SLO_SCALE)


@cache
def at(one: joined.Case, policy: str, load: float) -> joined.Edge:
    return joined.at(one, joined.policy(policy, one), load)


def attained(one: joined.Case, policy: str, load: float) -> float:
    report = at(one, policy, load).report
    assert report is not None
    return joined.attained(one, report)


@pytest.mark.parametrize(
    "one, load, others",
    [
        pytest.param(CHATS, 85.0, ["s_edf", "d_edf"], id="chats"),
        pytest.param(DOCUMENTS, 2.0, ["s_edf", "lars"], id="documents", marks=pytest.mark.slow),
    ],
)
def test_beyond_capacity_more_requests_are_in_time_than_under_any_other_order(one, load, others):
    ours = attained(one, "millrace", load)
    assert ours >= joined.GOAL
    assert ours > max(attained(one, policy, load) for policy in others)


def test_nobody_waits_as_long_as_under_slack_aware_edf():
    ours, theirs = (at(DOCUMENTS, policy, 2.0) for policy in ("millrace", "s_edf"))
    assert ours.longest_wait < theirs.longest_wait / 2


def test_waits_are_bounded_while_the_load_can_be_sustained():
    edge = at(DOCUMENTS, "millrace", 1.0)
    assert edge.report is not None and edge.report.engine.busy_share["prefill"] > 0.5
    assert edge.longest_wait < 23


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
