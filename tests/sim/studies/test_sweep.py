"""Searches the largest load that a system carries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.scenario import Scenario, Traffic, Watch, misses_allowed, simulate
from millrace.sim.studies.search import largest_load
from millrace.sim.studies.sweep import SweepOptions, sweep


def searched(start, tolerance, carries):
    loads, tried = largest_load(start, tolerance), []
    try:
        load = next(loads)
        while True:
            tried.append(load)
            load = loads.send(carries(load))
    except StopIteration as end:
        return end.value, tried


@given(st.floats(0.05, 100.0), st.floats(0.05, 100.0), st.floats(0.001, 0.5))
def test_the_edge_is_found_within_the_tolerance(start, edge, tolerance):
    found, tried = searched(start, tolerance, lambda load: load <= edge)
    assert found <= edge < found * (1 + tolerance) * (1 + 1e-12)
    assert found in tried
    distance = abs(math.log2(edge / start)) + 2
    assert len(tried) <= distance + math.ceil(math.log2(1 / math.log2(1 + tolerance))) + 1


def test_a_search_without_an_edge_ends():
    found, tried = searched(1.0, 0.1, lambda load: False)
    assert found is None
    assert min(tried) == 1 / 4096
    found, tried = searched(1.0, 0.1, lambda load: True)
    assert found == max(tried) == 4096


@given(st.integers(1, 5000), st.floats(0.01, 1.0))
def test_misses_allowed_is_the_most_that_attain(requests, goal):
    most = misses_allowed(requests, goal)
    assert (requests - most) / requests >= goal - 1e-9
    assert (requests - most - 1) / requests < goal


@pytest.mark.parametrize(
    ("requests", "goal", "most"), [(100, 0.9, 10), (10, 0.9, 1), (9, 0.9, 0), (30, 0.9, 3)]
)
def test_misses_allowed_by_hand(requests, goal, most):
    assert misses_allowed(requests, goal) == most


def scenario(policy="fcfs", **traffic):
    spec = SimSpec(
        profile=load_profile("llama3-8b-a100-tp1"),
        prefill=2,
        decode=2,
        scheduler=SchedulerConfig(policy=policy),
    )
    given = {"mix": "qwen", "rate_rps": 4.0, "requests": 150}
    return Scenario(spec=spec, traffic=Traffic(**(given | traffic)))


def test_a_sweep_finds_the_same_edge_in_one_process_and_in_two():
    systems = {name: scenario(name, requests=60) for name in ("fcfs", "s_edf")}
    told = []
    options = SweepOptions(start=4.0, tolerance=0.2, points=(2.0, 30.0), jobs=1)
    alone = sweep(systems, options, lambda name, value: told.append((name, value)))
    together = sweep(systems, SweepOptions(start=4.0, tolerance=0.2, points=(2.0, 30.0), jobs=2))
    assert alone == together
    assert [result.name for result in alone] == ["fcfs", "s_edf"]
    assert len(told) == sum(len(r.trials) + len(r.curve) for r in alone)
    for name, result in zip(systems, alone, strict=True):
        assert [value for value, _ in result.curve] == [2.0, 30.0]
        assert result.at_edge == simulate(systems[name].at_load(result.edge))
        assert result.at_edge.total.attainment >= 0.9
        beyond = min(trial.value for trial in result.trials if not trial.carried)
        assert beyond <= result.edge * 1.2 * (1 + 1e-9)
        assert simulate(systems[name].at_load(beyond)).total.attainment < 0.9


def test_the_slo_axis_looks_for_the_smallest_scale():
    options = SweepOptions(axis="slo-scale", tolerance=0.2, jobs=1)
    result = sweep({"one": scenario()}, options)[0]
    carried = [trial.value for trial in result.trials if trial.carried]
    failed = [trial.value for trial in result.trials if not trial.carried]
    assert result.edge == min(carried)
    assert max(failed) < result.edge <= max(failed) * 1.2 * (1 + 1e-9)
    assert simulate(scenario().at_slo_scale(result.edge)) == result.at_edge


@pytest.mark.parametrize(("requests", "attained", "carried"), [(100, 90, True), (100, 89, False)])
def test_a_load_is_carried_at_the_goal_exactly(monkeypatch, requests, attained, carried):
    def simulate(scenario, watch):
        collector = Collector()
        for index in range(requests):
            over = index >= attained and scenario.traffic.rate_rps > 8.0
            record = RequestRecord(
                index=index,
                class_name="a",
                arrival_s=0.0,
                input_tokens=1,
                output_tokens=1,
                error="late" if over or scenario.traffic.rate_rps > 20.0 else "",
            )
            collector.add(record)
        return collector.report(1.0)

    monkeypatch.setattr("millrace.sim.studies.sweep.simulate", simulate)
    one = scenario(requests=requests)
    result = sweep({"one": one}, SweepOptions(start=4.0, tolerance=0.01, jobs=1))[0]
    assert result.edge == pytest.approx(20.0 if carried else 8.0, rel=0.011)


def test_a_run_that_must_fail_stops_early():
    overloaded = scenario(rate_rps=100.0)
    whole = simulate(overloaded)
    cut = simulate(overloaded, Watch(goal=0.9))
    assert whole.total.requests == 150
    assert cut.total.requests - cut.total.attained == 16  # one more than 10 % of 150
    assert cut.total.requests < 150


def test_traffic_that_contradicts_itself_is_refused(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n")
    for settings, option in (
        ({}, "--trace and --mix"),
        ({"mix": "qwen"}, "--rate"),
        ({"mix": "qwen", "rate_rps": 1.0, "trace": trace}, "--trace"),
        ({"mix": "qwen", "rate_rps": 0.0}, "--rate"),
        ({"mix": "qwen", "rate_rps": 1.0, "requests": 0}, "--requests"),
        ({"mix": "qwen", "rate_rps": 1.0, "slo_scale": -1.0}, "--slo-scale"),
        ({"mix": "qwen", "rate_rps": 1.0, "window_s": (0.0, 1.0)}, "--window"),
    ):
        with pytest.raises(ConfigError, match=option):
            Traffic(**settings)
    with pytest.raises(ConfigError, match="lengths only"):
        Traffic(trace=trace).rows()


def test_a_replayed_trace_is_swept_by_its_scale(tmp_path):
    trace = tmp_path / "t.csv"
    rows = "".join(f"{0.5 * i},100,2\n" for i in range(5))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    one = Scenario(spec=scenario().spec, traffic=Traffic(trace=trace, requests=4))
    assert one.traffic.count() == 4
    assert [r.arrival_s for r in one.at_load(2.0).requests()] == [0.0, 0.25, 0.5, 0.75]
    assert [r.slo.ttft_s for r in one.at_slo_scale(0.5).requests()] == [0.25] * 4
    rated = Traffic(trace=trace, rate_rps=3.0, requests=40)
    assert len(list(Scenario(spec=one.spec, traffic=rated).requests())) == 40


def test_a_trace_replaces_medhas_short_requests(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n50,6\n52,6\n")
    traffic = Traffic(trace=trace, mix="medha-mix", rate_rps=1.0, requests=60, long_fraction=0.0)
    found = list(Scenario(spec=scenario().spec, traffic=traffic).requests())
    assert {r.input_tokens for r in found} <= {50, 51, 52}
    assert len(found) == 60
