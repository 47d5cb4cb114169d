"""No run of the simulator is above the offline bound."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millrace.experiments.joined import bound, goodputs
from millrace.experiments.joined import common as joined
from millrace.sim.results.report import RequestRecord
from millrace.sim.scenario import Scenario, Traffic, Watch, simulate

MIXED = joined.Case(
    traffic=Traffic(mix="mixed", rate_rps=1.0, requests=240, slo_scale=joined.SLO_SCALE), start=2.0
)
CHATS = joined.Case(
    traffic=Traffic(mix="qwen", rate_rps=1.0, requests=500), start=60.0, grouped=False
)


@pytest.mark.parametrize("policy", ["s_edf", "millrace"])
@pytest.mark.parametrize(
    "one, load", [(MIXED, 15.0), (MIXED, 40.0), (CHATS, 100.0), (CHATS, 170.0)]
)
def test_what_is_in_time_in_a_run_fits_the_relaxation(one, load, policy) -> None:
    scenario = Scenario(spec=joined.policy(policy, one), traffic=one.traffic)
    relaxation = bound.Relaxation(scenario)
    in_time = np.zeros(one.traffic.count())
    tally = goodputs.Tally()

    def saw(record: RequestRecord) -> None:
        assert record.ttft_slo_s is not None
        in_time[record.index] = record.ttft_s <= record.ttft_slo_s
        tally.saw(record)

    simulate(scenario.at_load(load), Watch(sink=saw))
    assert 0.2 < in_time.mean() < 1.0
    pool, _ = relaxation.at(load)
    assert pool.best_shares(in_time) == pytest.approx(in_time, abs=1e-6)
    for criterion, share in tally.fairness().in_time.items():
        if share > 0.0:
            assert relaxation.carries(load, criterion, goal=share)


def test_the_bound_is_the_last_load_of_the_grid_that_may_be_carried() -> None:
    scenario = Scenario(spec=joined.policy("millrace", MIXED), traffic=MIXED.traffic)
    found = bound.bounds(scenario, MIXED.start)
    relaxation = bound.Relaxation(scenario)
    for criterion, load in found.items():
        steps = math.log(load / MIXED.start, goodputs.STEP)
        assert steps == pytest.approx(round(steps), abs=1e-6)
        assert relaxation.carries(load, criterion)
        assert not relaxation.carries(load * goodputs.STEP, criterion)
    assert found["bands"] <= found["classes"] <= found["requests"]
