"""Simulated traffic: placements by predicted loss keep objectives that freeness would break."""

from __future__ import annotations

from dataclasses import replace

from millrace.core.config import SchedulerConfig
from millrace.core.instance.packing import PackingConfig
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.report import Report
from millrace.sim.scenario import Scenario, Traffic, simulate
from millrace.sim.workload.workload import SloClass

SPEC = SimSpec(
    profile=load_profile("llama3-8b-a100-tp1"),
    prefill=2,
    decode=1,
    max_chunk_tokens=8192,
    packing=PackingConfig(t_target_s=0.05),
    scheduler=SchedulerConfig(planner="least_queue", tasks_ahead=1),
)


def run(spec: SimSpec, traffic: Traffic) -> Report:
    return simulate(Scenario(spec=spec, traffic=traffic))


def test_where_both_ways_exist_each_request_takes_the_way_on_which_it_is_in_time():
    """Freeness, which is room for KV, says nothing of the prompts before a request."""
    traffic = Traffic(mix="qwen-colocated", rate_rps=20.0, requests=300)
    assert run(replace(SPEC, mixed=1), traffic).total.attainment > 0.99


def test_an_objective_that_nobody_could_keep_delays_no_other_request():
    kept = ("text:750:0", "image:1500:0", "file:18000:0")
    traffic = Traffic(
        mix="qwen-colocated",
        rate_rps=8.0,
        requests=200,
        slo_classes=tuple(map(SloClass.parse, (*kept, "search:12000:1"))),  # a TBT of 1 ms
    )
    report = run(SPEC, traffic)
    assert report.classes["search"].tbt_attainment == 0.0
    assert report.total.ttft_attainment > 0.98


def test_end_to_end_objectives_are_kept_and_counted():
    slos = tuple(map(SloClass.parse, ("text:0:0:1:15000", "image:0:0:1:15000", "file:18000:0")))
    traffic = Traffic(mix="qwen-colocated", rate_rps=6.0, requests=200, slo_classes=slos)
    report = run(replace(SPEC, decode=2), traffic)
    text = report.classes["text"]
    assert text.e2e_attainment > 0.98
    assert text.attainment <= min(text.e2e_attainment, text.ttft_attainment)
