"""Tetris sections 5.1, 6 and 7.1: the improvement rate by arrival rate."""

from __future__ import annotations

import dataclasses
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.rates import (
    BY_LOAD,
    STARTING_RATE,
    ImprovementRates,
    LiveImprovementRate,
    RateWindow,
    format_rates,
    live_rate,
    parse_rates,
)
from millrace.core.errors import ConfigError
from millrace.core.scheduler.effects import RunPrefill
from millrace.experiments.tetris.common import TESTBEDS, TRACES, shipped_rates
from millrace.profiles import load_profile
from millrace.sim.workload.mixes import MIXES, MixOptions
from support.core_events import Bench, instance, request

ROWS = ((0.5, 0.1), (1.0, 0.3), (1.5, 0.5), (2.0, 0.7))


@pytest.mark.parametrize(
    "arrivals_rps, rate",
    [(0.0, 0.1), (0.7, 0.1), (0.75, 0.1), (0.76, 0.3), (1.5, 0.5), (1.9, 0.7), (50.0, 0.7)],
)
def test_the_record_closest_to_the_observed_rate_applies(arrivals_rps, rate):
    """ "selects the recorded request rate closest to the observed value" """
    assert ImprovementRates(rows=ROWS).at(arrivals_rps) == rate


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30, unique=True), st.floats(0, 120))
def test_no_record_is_closer(arrivals, observed):
    rows = tuple((arrival, index / 30) for index, arrival in enumerate(sorted(arrivals)))
    found = ImprovementRates(rows=rows).at(observed)
    chosen = next(arrival for arrival, rate in rows if rate == found)
    assert abs(chosen - observed) == min(abs(arrival - observed) for arrival, _ in rows)


@pytest.mark.parametrize(
    "rows, message",
    [
        ((), "is empty"),
        (((1.0, 0.1), (1.0, 0.2)), "must ascend"),
        (((-1.0, 0.1),), "must ascend from 0"),
        (((0.0, 0.1), (float("nan"), 0.1)), "must ascend"),
        (((1.0, 1.5),), "between 0 and 1"),
    ],
)
def test_tables_that_make_no_sense(rows, message):
    with pytest.raises(ConfigError, match=message):
        ImprovementRates(rows=rows)


def test_the_window_slides():
    window = RateWindow(10.0)
    assert window.rate_rps(0.0) == 0.0
    window.arrived(0.0)
    assert window.rate_rps(0.0) == 0.0
    for second in range(1, 20):
        window.arrived(float(second))
    assert window.rate_rps(19.0) == 1.0  # those of seconds 10 to 19
    assert window.rate_rps(24.0) == 0.5
    assert window.rate_rps(100.0) == 0.0


def test_before_a_whole_window_the_time_since_the_first_arrival_counts():
    window = RateWindow(60.0)
    for tenth in range(40):
        window.arrived(100.0 + tenth / 10)
    assert window.rate_rps(105.0) == 8.0
    with pytest.raises(ConfigError, match="window_s is 0"):
        RateWindow(0.0)


def test_the_rate_is_refreshed_every_thirty_seconds():
    """ "the improvement rate is updated every 30 seconds" """
    live = LiveImprovementRate(ImprovementRates(rows=ROWS), window_s=30.0)
    assert live.at(0.0) == STARTING_RATE
    for at in range(60):
        live.arrived(at / 2)  # 2 a second
    assert live.at(29.9) == STARTING_RATE
    assert live.at(30.0) == 0.7
    assert live.at(59.9) == 0.7  # the window is empty by then, but nothing reads it
    assert live.at(60.0) == 0.1


def test_a_rate_set_by_hand_holds_until_it_is_taken_back():
    live = LiveImprovementRate(ImprovementRates(rows=ROWS))
    live.arrived(0.0)
    live.set_by_hand(0.25)
    assert (live.at(1.0), live.at(31.0)) == (0.25, 0.25)
    live.set_by_hand(None)
    assert live.at(32.0) == 0.1
    with pytest.raises(ConfigError, match="improvement_rate is 2"):
        live.set_by_hand(2)


def test_a_new_table_applies_at_once():
    live = LiveImprovementRate(ImprovementRates(rows=ROWS))
    live.arrived(0.0)
    live.replace_table([(0.0, 0.65)])
    assert live.at(1.0) == 0.65
    assert live.at(2.0) == 0.65


def test_rates_are_a_line_of_text_in_settings():
    assert format_rates(ImprovementRates(rows=ROWS)) == "0.5:0.1,1:0.3,1.5:0.5,2:0.7"
    assert parse_rates("0.5:0.1,1:0.3,1.5:0.5,2:0.7").rows == ROWS


@pytest.mark.parametrize("text", ["", "1", "1:x", "1:0.1:2", "2:0.1,1:0.2", "1:1.5"])
def test_text_that_is_no_table_is_refused(text):
    with pytest.raises(ConfigError, match="improvement_rates"):
        parse_rates(text)


def test_without_a_table_the_rate_follows_the_work_that_arrives():
    live = live_rate(SchedulerConfig().improvement_rate, "")
    assert live.source == "by load"
    for second in range(120):
        live.arrived(float(second), 0.05)  # a twentieth of the instances' time
    assert live.at(120.0) == 0.05
    for second in range(120, 240):
        live.arrived(float(second), 1.2)  # more than they can do
    assert live.at(240.0) == 0.7
    live.set_by_hand(0.1)
    assert (live.source, live.at(241.0)) == ("fixed", 0.1)


def test_by_load_agrees_with_the_tables_that_simulation_found():
    """Figures 11 and 12: within 0.25 at every load of every table, and by 0.05 on average."""
    off = []
    for key, testbed in TESTBEDS.items():
        prefill = load_profile(testbed.prefill_profile).prefill
        for trace in TRACES:
            draw, rng = MIXES[f"tetris-{trace}"](MixOptions()).row_draw(), Random(0)
            work_s = fmean(prefill.chunk_s(draw(rng).input_tokens) for _ in range(400))
            for arrivals_rps, best in shipped_rates()[key][trace].rows:
                load = arrivals_rps * work_s / testbed.prefill
                off.append(abs(BY_LOAD.at(load) - best))
    assert max(off) <= 0.25
    assert fmean(off) < 0.07


def fleet(rates: str) -> Bench:
    """Four instances on one node, where a group of two cuts a prefill by a quarter."""
    latency = SpLatency(by_sp={1: Latency(b=8e-3), 2: Latency(b=6e-3)})
    config = SchedulerConfig(
        planner="single_chunk", improvement_rate=-1.0, improvement_rates=rates, tasks_ahead=64
    )
    cards = [instance(name, pages=100_000) for name in ("p0", "p1", "p2", "p3", "d0")]
    return Bench(
        *(dataclasses.replace(card, latency=latency, node="n") for card in cards), config=config
    )


def groups(bench: Bench, gap_s: float, count: int, name: str) -> list[int]:
    """Sizes of the groups of requests that come `gap_s` apart and are served at once."""
    sizes = []
    for index in range(count):
        bench.now_s += gap_s
        request_id = f"{name}{index}"
        sent = [e for e in bench.submit(request_id, 100) if isinstance(e, RunPrefill)]
        sizes.append(len(sent))
        bench.computed(sent[0].chunks[0].instance_ids[0], request_id)
        for effect in sent:
            bench.released(effect.instance_id, request_id)
        bench.decoding("d0", request_id)
        bench.finished("d0", request_id)
    return sizes


def test_the_machine_plans_by_the_rate_of_its_arrivals():
    """Section 7.1: "updated every 30 seconds" by the closest record; 0.3 before the first look."""
    bench = fleet("0.1:0.1,1:0.5,10:0.2")
    slow = groups(bench, 5.0, 20, "slow")
    assert slow[:6] == [1] * 6  # a quarter is less than the 0.3 it starts with
    assert slow[7:] == [2] * 13  # 0.2 arrivals/s: a tenth will do
    assert groups(bench, 1.0, 120, "fast")[-60:] == [1] * 60
    assert groups(bench, 0.1, 1200, "flood")[-300:] == [2] * 300


def test_a_pool_that_comes_later_plans_by_it_too():
    bench = fleet("0.1:0.1,1:0.5")
    groups(bench, 5.0, 10, "slow")
    for card in [*bench.machine.cluster.instances.values()]:
        bench.died(card.id)
        bench.step(dataclasses.replace(card.card, generation=2))
    bench.now_s += 5.0
    found = bench.step(request("last", 100, arrival_s=bench.now_s))
    assert sum(isinstance(effect, RunPrefill) for effect in found) == 2
