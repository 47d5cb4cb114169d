"""Goodput by all requests, by classes and by length bands."""

from __future__ import annotations

import pytest

from millrace.experiments.joined import common as joined
from millrace.experiments.joined import goodputs, policies
from millrace.sim.results.report import RequestRecord
from millrace.sim.scenario import Scenario, Traffic


def record(name: str, tokens: int, ttft_s: float, **more) -> RequestRecord:
    return RequestRecord(
        index=0,
        class_name=name,
        arrival_s=0.0,
        input_tokens=tokens,
        output_tokens=1,
        ttft_s=ttft_s,
        ttft_slo_s=1.0,
        isolated_s=0.5,
        **more,
    )


def test_the_worst_class_and_the_worst_band_count() -> None:
    tally = goodputs.Tally()
    for number in range(100):
        tally.saw(record("chat", 100, 0.5))
        tally.saw(record("file", 1000, 0.5 if number < 95 else 2.0))
        tally.saw(record("file", 100_000, 0.5 if number < 60 else 2.0))
    tally.saw(record("file", 10**6, 9.0))  # too few for a band of their own
    found = tally.fairness()
    assert found.in_time["requests"] == pytest.approx(255 / 301)
    assert found.in_time["classes"] == pytest.approx(155 / 201)
    assert found.in_time["bands"] == pytest.approx(0.6)
    assert found.classes == {"chat": 1.0, "file": pytest.approx(155 / 201)}


def test_a_failure_and_a_slow_stream_are_not_in_time() -> None:
    tally = goodputs.Tally()
    tally.saw(record("chat", 100, 0.5, error="refused"))
    tally.saw(record("chat", 100, 0.5, tbt_s=0.2, tbt_slo_s=0.1))
    tally.saw(record("chat", 100, 0.5, tbt_s=0.1, tbt_slo_s=0.1))
    assert tally.fairness().in_time["requests"] == pytest.approx(1 / 3)


def test_fairness_of_slowdowns() -> None:
    tally = goodputs.Tally()
    for ttft_s in (0.5, 1.0):
        tally.saw(record("chat", 100, ttft_s, queued_s=ttft_s - 0.5))
    found = tally.fairness()
    assert (found.mean_slowdown, found.longest_wait) == (1.5, 1.0)
    assert found.jain == pytest.approx(1.5**2 / (2 * 1.25))


def test_a_goodput_is_carried_and_one_step_more_is_not() -> None:
    traffic = Traffic(mix="tetris-short", rate_rps=1.0, requests=60, slo_scale=joined.SLO_SCALE)
    case = joined.Case(traffic=traffic, start=2.0)
    scenario = Scenario(spec=joined.policy("millrace", case), traffic=traffic)
    found = goodputs.goodputs(scenario, case.start)
    assert found["bands"] <= found["classes"] <= found["requests"]
    for criterion, load in found.items():
        assert goodputs.run(scenario, load).in_time[criterion] >= goodputs.GOAL
        above = goodputs.run(scenario, load * goodputs.STEP)
        assert above.in_time[criterion] < goodputs.GOAL


def test_held_out_draws_differ() -> None:
    case = joined.further_cases(quick=True)["agents"]
    first, second = (policies.drawn_by(case, seed).traffic for seed in (1, 2))
    assert (first.seed, second.seed) == (1, 2) and first.requests == second.requests


def test_the_default_is_set_beside_the_best_of_the_others() -> None:
    found = {
        ("agents", seed, policy): dict.fromkeys(goodputs.CRITERIA, load * seed)
        for seed in (1, 2)
        for policy, load in (("fcfs", 1.0), ("s_edf", 2.0), ("millrace", 2.5))
    }
    ratios = policies.ratios_of(found, "agents", (1, 2), ("fcfs", "s_edf", "millrace"))
    assert all(ratios[one]["best"] == "s_edf" for one in goodputs.CRITERIA)
    assert ratios["classes"]["ratio"] == pytest.approx(1.25)


@pytest.mark.parametrize("limit", [-190, -60, -3, 0, 7, 63, 150, 195])
def test_a_search_finds_any_step_within_reach(limit) -> None:
    assert goodputs.largest_step(lambda at: at <= limit, 0) == limit


def test_a_search_ends_where_everything_or_nothing_is_carried() -> None:
    assert goodputs.largest_step(lambda at: at <= goodputs.REACH, 0) == goodputs.REACH
    assert goodputs.largest_step(lambda at: False, 0) is None


@pytest.mark.parametrize("mix", ["mixed", "agents", "bursts", "diurnal", "qwen"])
def test_every_load_has_the_same_groups(mix) -> None:
    traffic = Traffic(mix=mix, rate_rps=1.0, requests=60)
    case = joined.Case(traffic=traffic, start=1.0)
    scenario = Scenario(spec=joined.policy("millrace", case), traffic=traffic)
    low, high = (goodputs.groups_of(list(scenario.at_load(load).requests())) for load in (0.5, 40))
    for criterion in goodputs.CRITERIA:
        assert [group.tolist() for group in low[criterion]] == [
            group.tolist() for group in high[criterion]
        ]


def test_runs_cut_short_and_other_beginnings_find_the_same_edges() -> None:
    traffic = Traffic(mix="mixed", rate_rps=1.0, requests=120, slo_scale=joined.SLO_SCALE)
    case = joined.Case(traffic=traffic, start=4.0)
    scenario = Scenario(spec=joined.policy("s_edf", case), traffic=traffic)
    found = goodputs.goodputs(scenario, case.start)
    assert found == goodputs.goodputs(scenario, case.start, found)
    for criterion, load in found.items():
        assert goodputs.run(scenario, load).in_time[criterion] >= goodputs.GOAL
        for step in range(1, goodputs.LOOK_AHEAD + 1):
            above = goodputs.run(scenario, load * goodputs.STEP**step)
            assert above.in_time[criterion] < goodputs.GOAL
