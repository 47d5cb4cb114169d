"""Two systems on the same requests, request by request."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from millrace.cli.sim.command import register
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.scenario import Scenario, Traffic
from millrace.sim.studies.compare import Pair, compare
from millrace.sim.workload.workload import SloClass
from support.simulation import toy_profile


def scenario(policy: str, **traffic: object) -> Scenario:
    return Scenario(
        spec=SimSpec(
            profile=toy_profile(),
            prefill=1,
            decode=1,
            scheduler=SchedulerConfig(policy=policy, preemption="operator"),
        ),
        traffic=Traffic(
            mix="medha-mix",
            rate_rps=3.0,
            requests=60,
            max_input_tokens=60_000,
            long_fraction=0.1,
            slo_classes=(SloClass(name="short", ttft_s=0.5), SloClass(name="long", ttft_s=60.0)),
            **traffic,
        ),
    )


def test_a_system_equals_itself():
    found = compare(scenario("fcfs"), scenario("fcfs"))
    assert found.reports[0] == found.reports[1] and len(found.pairs) == 60
    for one in found.classes.values():
        assert (one.only_a_met, one.only_b_met, one.earlier_in_a, one.earlier_in_b) == (0, 0, 0, 0)
        assert one.median_ratio == 1.0


def test_short_requests_gain_from_a_policy_that_lets_them_pass():
    found = compare(scenario("fcfs"), scenario("lars"))
    short = found.classes["short"]
    assert short.earlier_in_b > short.earlier_in_a
    assert short.only_b_met > short.only_a_met
    # The counts by class agree with both reports.
    for which, report in enumerate(found.reports):
        met = sum(pair.met[which] for pair in found.pairs)
        assert met == report.total.attained
    best = found.largest(1)[0]
    assert best.class_name == "short" and best.gain_s == max(p.gain_s for p in found.pairs)


def test_what_differs_in_traffic_is_not_compared():
    a = scenario("fcfs")
    with pytest.raises(ConfigError, match="different traffic"):
        compare(a, replace(a, traffic=replace(a.traffic, seed=1)))


def test_a_failed_request_gains_nothing():
    pair = Pair(index=0, class_name="c", input_tokens=1, ttft_s=(None, 0.5), met=(False, True))
    assert pair.gain_s == 0.0


APP = typer.Typer()
register(APP)


def run(*arguments: str):
    return CliRunner().invoke(APP, ["compare", *arguments])


TRAFFIC = ("--mix", "medha-mix", "--rate", "1", "--requests", "12", "--prefill", "1")


def test_the_command_compares_and_writes_both_boards(tmp_path):
    out = tmp_path / "out.json"
    done = run("fcfs", "edf,planner=cdsp", *TRAFFIC, "--json", str(out), "--board", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "A: fcfs" in done.output and "B: edf" in done.output
    document = json.loads(out.read_text())
    assert len(document["results"]["pairs"]) == 12
    for name, policy in (("a.jsonl", "fcfs"), ("b.jsonl", "edf")):
        head, *lines = map(json.loads, (tmp_path / name).read_text().splitlines())
        assert policy in head["title"]
        assert {line["policy"] for line in lines if line["kind"] == "fleet"} == {policy}


@pytest.mark.parametrize(
    ("system", "wrong"),
    [("colour=red", "'colour' is no axis"), ("nonsense", "nonsense"), ("planner=best", "best")],
)
def test_a_system_that_does_not_exist_is_refused(system, wrong):
    done = run("fcfs", system, *TRAFFIC)
    assert done.exit_code == 1 and wrong in done.output
